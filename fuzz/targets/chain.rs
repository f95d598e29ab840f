//! See `fuzz::chain`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::chain::run(input));
