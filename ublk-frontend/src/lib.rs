//! Serves a volume as /dev/ublkbN (Linux 6.0 and later). The frontend is not built yet; the device trait it will serve is `lh_block::Device`, and `auto` does not offer it.
