//! See `fuzz::nbd`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::nbd::run(input));
