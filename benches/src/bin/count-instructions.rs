//! `count-instructions CASE N` does one case so many times, and nothing else; `count-instructions --list` names the
//! cases. Whoever counts its instructions at two values of N knows what one costs: see `scripts/bench --instructions`.

use anyhow::{Result, bail};
use benches::{IndexedStore, NbdStream, Places, ReplicaRig, VolumeRig};
use lh_block::Op;
use nbd_frontend::Framing;

/// A case's name, and what does it so many times.
type Case = (&'static str, fn(u64) -> Result<()>);

const CASES: &[Case] = &[
    ("queue write, 3 members", |n| queue(n, 3, |rig, place| rig.write(place))),
    ("queue write, 1 member", |n| queue(n, 1, |rig, place| rig.write(place))),
    ("queue read, 3 members", |n| queue(n, 3, |rig, place| rig.read(place))),
    ("queue write, 3 members, depth 32", queue_deep),
    ("NBD request, simple", |n| parse(n, Framing::Simple)),
    ("NBD request, extended", |n| parse(n, Framing::Extended)),
    ("replica write, overwriting", |n| replica_write(n, ReplicaRig::overwriting()?)),
    ("replica write, into holes", |n| replica_write(n, ReplicaRig::new(0)?)),
    ("index look-up, 2000 runs", look_up),
    ("index update, volume half full", update),
];

const SIZE: u64 = VolumeRig::SIZE;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["--list"] => {
            for (name, _) in CASES {
                println!("{name}");
            }
            Ok(())
        }
        [name, count] => match CASES.iter().find(|(case, _)| *case == name) {
            Some((_, run)) => run(count.parse()?),
            None => bail!("no case {name:?}: see --list"),
        },
        _ => bail!("usage: count-instructions CASE N | --list"),
    }
}

fn queue(n: u64, members: u8, act: fn(&mut VolumeRig, u64)) -> Result<()> {
    let (mut rig, mut places) = (VolumeRig::new(members, false), Places::new(SIZE));
    for _ in 0..n {
        act(&mut rig, places.next_block());
    }
    Ok(())
}

fn queue_deep(n: u64) -> Result<()> {
    const DEPTH: u64 = 32;
    let (mut rig, mut places) = (VolumeRig::new(3, false), Places::new(SIZE / DEPTH));
    for _ in 0..n / DEPTH {
        rig.do_all(Op::Write { fua: false }, (0..DEPTH).map(|at| at * (SIZE / DEPTH) + places.next_block()));
    }
    Ok(())
}

fn parse(n: u64, framing: Framing) -> Result<()> {
    let stream = NbdStream::new(framing);
    let header = stream.write_header(1 << 30);
    for _ in 0..n {
        std::hint::black_box(stream.take(std::hint::black_box(&header)));
    }
    Ok(())
}

fn replica_write(n: u64, mut rig: ReplicaRig) -> Result<()> {
    for _ in 0..n {
        std::hint::black_box(rig.write());
    }
    Ok(())
}

fn look_up(n: u64) -> Result<()> {
    let mut index = IndexedStore::new(2000)?;
    for _ in 0..n {
        std::hint::black_box(index.look_up());
    }
    Ok(())
}

/// Most writes close a gap between two others.
fn update(n: u64) -> Result<()> {
    let mut index = IndexedStore::new(200_000)?;
    (0..n).for_each(|_| index.update());
    Ok(())
}
