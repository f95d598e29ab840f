//! See `fuzz::keeper`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::keeper::run(input));
