//! See `fuzz::iscsi`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::iscsi::run(input));
