//! A directory that another program wrote, as an engine uses it.

mod serve_client;

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use lh_wire::{BlockState, Header, OpCode, Status};
use replica::store::{Directory, OpenOptions};
use serve_client::{MIB, SIZE, Server, pattern, places, session};

/// So many are on their way at once that some are written only when the first have asked for a map.
const IMAGES: u64 = 24;

/// An empty head over an empty snapshot `one`, as Longhorn leaves them.
fn foreign(path: &Path) {
    fs::create_dir_all(path).unwrap();
    let layer = |name: &str, parent: &str| {
        File::create_new(path.join(name)).unwrap().set_len(SIZE).unwrap();
        let meta = format!(
            "{{\"Name\":\"volume-head-000.img\",\"Parent\":\"{parent}\",\"Removed\":false,\"UserCreated\":true,\
             \"Created\":\"2026-01-01T00:00:00Z\",\"Labels\":null}}\n"
        );
        fs::write(path.join(format!("{name}.meta")), meta).unwrap();
    };
    layer("volume-snap-one.img", "");
    layer("volume-head-002.img", "volume-snap-one.img");
    let volume = format!(
        "{{\"Size\":{SIZE},\"Head\":\"volume-head-002.img\",\"Dirty\":false,\"Rebuilding\":false,\"Error\":\"\",\
         \"Parent\":\"volume-snap-one.img\",\"SectorSize\":512,\"BackingFilePath\":\"\",\"Encrypted\":false}}\n"
    );
    fs::write(path.join("volume.meta"), volume).unwrap();
}

/// A layer of an import gets its zero map with the first image that has zeroes. Others that were planned before, and are written
/// later, go into that one.
#[test]
fn images_with_zeroes_beside_each_other_get_one_zero_map() {
    for place in places() {
        foreign(&place.path().join("replica"));
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let states: Vec<BlockState> =
            (0..256).map(|n| if n % 2 == 0 { BlockState::Data } else { BlockState::Zero }).collect();
        let trailer: Vec<u8> = states.iter().map(|s| *s as u8).chain(*b"one").collect();
        let mut messages = Vec::new();
        for n in 0..IMAGES {
            let header = c.header(OpCode::PutLayer, n * u64::from(MIB), MIB);
            let image = [&pattern(n + 100, 128 * 4096)[..], &trailer].concat();
            let aux = u32::try_from(trailer.len()).unwrap();
            messages.push((Header { aux, ..header }, image));
        }
        messages.iter().for_each(|(header, image)| c.send(*header, image));
        for _ in 0..IMAGES {
            assert_eq!(c.receive().status(), Status::Ok);
        }
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        drop(c);
        server.stop();
        let options = OpenOptions { lock_wait: Duration::from_secs(5) };
        let (_directory, store) = Directory::open(&place.path().join("replica"), &options).unwrap();
        let layer = store.layer("one").unwrap();
        for n in 0..IMAGES {
            let range = lh_block::Extent::new(n * u64::from(MIB), MIB.into());
            assert_eq!(store.layer_states(layer, range).unwrap(), states, "image {n}");
        }
    }
}
