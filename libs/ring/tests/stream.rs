//! Streams over a ring: what is sent arrives, in order, at addresses congruent to the stream, whatever the sizes.

mod drive;

use std::os::unix::net::UnixStream;
use std::time::Duration;

use drive::{Random, pair, token};
use lh_ring::{CHUNK, Fd, Payload, Pool, Ring, Rx, Tx};

const HEADER: usize = 16;

/// A message: a header that tells a length and a seed, padding, and that many bytes made from the seed.
fn fill(pool: &Pool, seed: u32, len: usize) -> Payload {
    let mut payload = pool.alloc(u32::try_from(len).expect("small"), 512).expect("room in the pool");
    let bytes = drive::pattern(seed, len);
    payload.write_at(0, &bytes);
    payload
}

fn check(payload: &Payload, seed: u32) {
    assert!(payload.to_vec() == drive::pattern(seed, payload.len()), "message {seed} arrived damaged");
}

/// Parses what is there: seeds of the messages taken.
fn parse(rx: &mut Rx, taken: &mut Vec<(u32, Payload)>) {
    loop {
        let position = rx.position();
        let Some(header) = rx.peek::<HEADER>() else { return };
        let seed = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
        let len = u32::from_le_bytes(header[4..8].try_into().expect("4 bytes")) as usize;
        let pad = u32::from_le_bytes(header[8..12].try_into().expect("4 bytes")) as usize;
        if rx.available() < HEADER + pad + len {
            return;
        }
        rx.skip(HEADER + pad);
        assert_eq!((position + (HEADER + pad) as u64) % 512, 0);
        let payload = rx.take(len);
        if len.is_multiple_of(512) {
            assert!(payload.is_aligned(512, 512), "message {seed} of {len} bytes lost its alignment");
        }
        taken.push((seed, payload));
    }
}

fn push(tx: &mut Tx, position: &mut usize, seed: u32, payload: Payload) {
    let pad = (512 - (*position + HEADER) % 512) % 512;
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&seed.to_le_bytes());
    header[4..8].copy_from_slice(&u32::try_from(payload.len()).expect("small").to_le_bytes());
    header[8..12].copy_from_slice(&u32::try_from(pad).expect("small").to_le_bytes());
    *position += HEADER + pad + payload.len();
    tx.push_header(&header);
    tx.push_padding(pad);
    tx.push_payload(payload);
}

/// Sends messages of random sizes and checks every byte of them; some payloads are held for a while, so that chunks
/// cannot be filled again at once.
fn echo(seed: u64, messages: u32, max: usize, send_buffer: Option<usize>) {
    let mut random = Random(seed);
    let (near, far) = pair();
    if let Some(bytes) = send_buffer {
        nix::sys::socket::setsockopt(&near, nix::sys::socket::sockopt::SndBuf, &bytes).expect("SO_SNDBUF");
    }
    let mut ring = Ring::new(8).expect("io_uring");
    let pool = Pool::new(4 << 20, 32 << 20).expect("pool");
    let (mut tx, mut rx) = (Tx::new(&pool), Rx::new(&pool, 4096));
    let (mut sent, mut received, mut position) = (0, 0, 0);
    let mut held = Vec::new();
    while received < messages {
        while sent < messages && tx.queued_bytes() < 2 << 20 {
            let len = random.below(max) & if random.below(2) == 0 { !511 } else { !0 };
            let payload = fill(&pool, sent, len);
            push(&mut tx, &mut position, sent, payload);
            sent += 1;
        }
        ring.send(token(1, 0), &near, &mut tx);
        if !rx.is_outstanding() {
            let want = rx.peek::<HEADER>().map_or(HEADER, |h| {
                HEADER + 512 + u32::from_le_bytes(h[4..8].try_into().expect("4 bytes")) as usize
            });
            assert!(ring.recv(token(2, 0), &far, &mut rx, u32::try_from(want).expect("small")));
        }
        ring.turn(Some(Duration::from_secs(10))).expect("turn");
        while let Some(c) = ring.next() {
            let n = c.result.expect("send or receive");
            assert!(n > 0, "token {:?} moved nothing", c.token);
            parse(&mut rx, &mut held);
        }
        let last = sent == messages && tx.is_empty() && rx.available() == 0;
        while held.len() > if last { 0 } else { random.below(20) } {
            let at = random.below(held.len());
            let (seed, payload) = held.swap_remove(at);
            check(&payload, seed);
            received += 1;
        }
    }
    assert!(tx.is_empty() && rx.available() == 0);
    drop((tx, rx, ring));
    assert_eq!(pool.used_bytes(), 0, "every chunk came back");
}

#[test]
fn messages_of_all_sizes_survive_the_ends_of_chunks() {
    echo(1, 3000, 5000, None);
    echo(2, 400, 3 * CHUNK, None);
    echo(3, 60, 1 << 20, None);
}

#[test]
fn a_small_socket_buffer_sends_in_parts() {
    echo(4, 200, 200_000, Some(4096));
}

#[test]
fn a_peer_that_is_gone_is_an_error_and_no_signal() {
    let (near, far) = pair();
    drop(far);
    let mut ring = Ring::new(8).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let (mut tx, mut rx) = (Tx::new(&pool), Rx::new(&pool, 1));
    tx.push_header(b"hello");
    assert!(ring.send(token(1, 0), &near, &mut tx));
    assert!(ring.recv(token(2, 0), &near, &mut rx, 1));
    let done = drive::completions(&mut ring, 2);
    assert_eq!(done[0].result.as_ref().unwrap_err().raw_os_error(), Some(libc::EPIPE));
    assert_eq!(*done[1].result.as_ref().expect("end of stream"), 0);
}

#[test]
fn a_handshake_moves_the_stream_to_the_right_address() {
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut rx = Rx::new(&pool, 4096);
    let mut bytes = b"a handshake of some length".to_vec();
    let handshake = bytes.len();
    bytes.extend(drive::pattern(7, 3 * 4096));
    assert!(rx.feed(&bytes));
    rx.skip(handshake);
    assert!(rx.set_position(0));
    assert_eq!(rx.position(), 0);
    let first = rx.take(4096);
    assert!(first.is_aligned(4096, 4096));
    // And with nothing there, while a payload holds the chunk.
    rx.skip(rx.available());
    assert!(rx.set_position(4096 - 80));
    assert!(rx.feed(&[1; 80 + 4096]));
    assert_eq!(rx.take(80).to_vec(), vec![1; 80]);
    assert!(rx.take(4096).is_aligned(4096, 4096));
    assert!(first.to_vec() == drive::pattern(7, 4096), "what was handed out stays");
}

#[test]
fn an_exhausted_pool_refuses_a_receive_until_memory_is_back() {
    let (near, far) = pair();
    let mut ring = Ring::new(8).expect("io_uring");
    let pool = Pool::new(0, 2 * CHUNK).expect("pool");
    let all = pool.alloc(u32::try_from(2 * CHUNK).expect("small"), 4096).expect("all of it");
    assert!(pool.alloc(1, 1).is_none());
    let mut rx = Rx::new(&pool, 4096);
    assert!(!ring.recv(token(2, 0), &far, &mut rx, 1));
    // An answer still gets out.
    let mut tx = Tx::new(&pool);
    tx.push_header(b"answer");
    assert!(ring.send(token(1, 0), &near, &mut tx));
    drive::completions(&mut ring, 1);
    drop(all);
    assert!(ring.recv(token(2, 0), &far, &mut rx, 1));
    drive::completions(&mut ring, 1);
    assert_eq!(rx.take(6).to_vec(), b"answer");
}

#[test]
fn neighbouring_headers_leave_in_one_piece() {
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut tx = Tx::new(&pool);
    for i in 0..100_u8 {
        tx.push_header(&[i; 64]);
    }
    tx.push_padding(5000);
    tx.push_payload(fill(&pool, 9, 700));
    tx.push_header(&[200]);
    let mut expected: Vec<u8> = (0..100_u8).flat_map(|i| [i; 64]).collect();
    expected.extend([0; 5000]);
    expected.extend(drive::pattern(9, 700));
    expected.push(200);
    assert_eq!(tx.queued_bytes(), expected.len());
    assert!(tx.drain() == expected);
    assert!(tx.is_empty());
    assert_eq!(pool.used_bytes(), 0, "an idle queue holds no memory");
}

#[test]
fn a_header_behind_a_full_chunk_keeps_its_bytes() {
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut tx = Tx::new(&pool);
    // The queue's own chunk begins where this one ends.
    tx.push_payload(fill(&pool, 1, CHUNK));
    tx.push_header(b"first");
    tx.push_header(b"second");
    assert!(tx.drain()[CHUNK..] == *b"firstsecond");
}

#[test]
fn a_header_pushed_during_a_send_does_not_change_what_is_in_flight() {
    let (near, far) = pair();
    let mut ring = Ring::new(8).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut tx = Tx::new(&pool);
    tx.push_header(b"one");
    assert!(ring.send(token(1, 0), &near, &mut tx));
    tx.push_header(b"two");
    assert!(!ring.send(token(1, 0), &near, &mut tx), "one send at a time");
    let done = drive::completions(&mut ring, 1);
    assert_eq!(*done[0].result.as_ref().expect("sent"), 3);
    assert_eq!(tx.queued_bytes(), 3);
    assert!(ring.send(token(1, 0), &near, &mut tx));
    drive::completions(&mut ring, 1);
    let mut rx = Rx::new(&pool, 1);
    assert!(ring.recv(token(2, 0), &far, &mut rx, 6));
    drive::completions(&mut ring, 1);
    assert_eq!(rx.take(6).to_vec(), b"onetwo");
}

#[test]
fn a_dropped_stream_lives_until_its_receive_has_ended() {
    let (near, far) = pair();
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut ring = Ring::new(8).expect("io_uring");
    let mut rx = Rx::new(&pool, 1);
    assert!(ring.recv(token(2, 7), &far, &mut rx, 100));
    assert!(!ring.recv(token(2, 8), &far, &mut rx, 100), "one receive at a time");
    ring.turn(Some(Duration::ZERO)).expect("turn");
    drop(rx);
    assert!(pool.used_bytes() > 0, "the kernel may still write");
    let mut peer = UnixStream::from(near.into_owned().expect("only holder"));
    std::io::Write::write_all(&mut peer, b"late").expect("write");
    let done = drive::completions(&mut ring, 1);
    assert_eq!(done[0].token.slot, 7);
    assert_eq!(pool.used_bytes(), 0);
    let _ = Fd::new(peer);
}
