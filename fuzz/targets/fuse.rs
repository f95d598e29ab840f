//! See `fuzz::fuse`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::fuse::run(input));
