//! See `fuzz::meta`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::meta::run(input));
