//! Doors for the fuzz targets: parsers that nothing outside of this crate calls.

use super::meta::{LayerMeta, VolumeMeta, heads_after, is_head};

/// Reads a `volume.meta`: the bytes that this program would write for it, or `None` if it is refused.
pub fn volume_meta(bytes: &[u8]) -> Option<Vec<u8>> {
    let meta = VolumeMeta::parse(bytes).ok()?;
    assert!(meta.size() > 0 && is_head(&meta.head));
    assert!(heads_after(&meta.head).next().is_some_and(|next| is_head(&next) && next != meta.head));
    Some(meta.encode())
}

/// The same for the meta beside a layer.
pub fn layer_meta(bytes: &[u8]) -> Option<Vec<u8>> {
    LayerMeta::parse("volume-snap-s.img", bytes).ok().map(|meta| meta.encode())
}
