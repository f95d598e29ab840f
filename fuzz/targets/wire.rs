//! See `fuzz::wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::wire::run(input));
