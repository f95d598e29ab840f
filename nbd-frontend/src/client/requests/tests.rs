use lh_ring::Pool;

use super::*;

const BLOCK: u64 = 4096;
const WRITE: Op = Op::Write { fua: false };

fn request(tag: u64, op: Op, offset: u64, len: u64) -> Request<Payload> {
    Request { tag, op, range: Extent::new(offset, len), data: None }
}

/// What a call says: command, flags, offset, length, cookie.
fn said(call: &Call) -> (u16, u16, u64, u32, u64) {
    let head = proto::Request::read_from_bytes(&call.head).unwrap();
    assert_eq!(head.magic.get(), REQUEST_MAGIC);
    (head.kind.get(), head.flags.get(), head.offset.get(), head.length.get(), head.cookie.get())
}

fn sent(requests: &mut Requests) -> Vec<(u16, u16, u64, u32, u64)> {
    std::iter::from_fn(|| requests.next_call()).map(|call| said(&call)).collect()
}

fn reply(cookie: u64, error: u32) -> [u8; REPLY_LEN] {
    let reply = SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    reply.as_bytes().try_into().unwrap()
}

fn result(answer: Result<Answer, Broken>) -> (u64, Result<(), IoError>) {
    match answer {
        Ok(Answer::Done(done)) => (done.tag, done.result),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_unanswered_is_sent_again_in_order_of_submission() {
    let mut requests = Requests::new(8);
    for tag in 0..5 {
        requests.submit(request(tag, WRITE, tag % 2 * BLOCK, BLOCK));
    }
    let first = sent(&mut requests);
    assert!(requests.next_call().is_none());
    // The places of the first two are free, and are used by what comes later.
    assert_eq!(result(requests.reply(&reply(first[1].4, 0))), (1, Ok(())));
    assert_eq!(result(requests.reply(&reply(first[0].4, 0))), (0, Ok(())));
    requests.submit(request(5, WRITE, 0, BLOCK));
    requests.submit(request(6, Op::Flush, 0, 0));
    requests.lost();
    let again = sent(&mut requests);
    let offsets: Vec<u64> = again.iter().map(|call| call.2).collect();
    assert_eq!(offsets, [0, BLOCK, 0, 0, 0]);
    assert_eq!(again.last().unwrap().0, command::FLUSH);
    for (call, tag) in again.iter().zip(2..) {
        assert_eq!(result(requests.reply(&reply(call.4, 0))), (tag, Ok(())));
    }
    assert!(requests.is_empty() && requests.room() == 8);
}

#[test]
fn an_answer_on_the_connection_before_is_no_answer_on_this_one() {
    let mut requests = Requests::new(1);
    requests.submit(request(7, WRITE, 0, BLOCK));
    let before = sent(&mut requests)[0].4;
    requests.lost();
    assert_eq!(
        requests.reply(&reply(before, 0)).unwrap_err(),
        Broken::Cookie(before),
        "nothing was sent yet"
    );
    let now = sent(&mut requests)[0].4;
    assert_eq!(requests.reply(&reply(before, 0)).unwrap_err(), Broken::Cookie(before));
    assert_eq!(result(requests.reply(&reply(now, 0))), (7, Ok(())));
    assert_eq!(requests.reply(&reply(now, 0)).unwrap_err(), Broken::Cookie(now), "answered twice");
}

#[test]
fn a_long_range_goes_in_pieces_and_what_comes_later_waits() {
    const GIB: u64 = 1 << 30;
    let mut requests = Requests::new(4);
    let zeroes = Op::WriteZeroes { fua: true, may_unmap: false, fast: false };
    requests.submit(request(1, zeroes, BLOCK, 2 * GIB + BLOCK));
    requests.submit(request(2, WRITE, 0, BLOCK));
    let flags = command_flag::FUA | command_flag::NO_HOLE;
    let first = sent(&mut requests);
    assert_eq!(first.len(), 1);
    assert_eq!(
        (first[0].0, first[0].1, first[0].2, first[0].3),
        (command::WRITE_ZEROES, flags, BLOCK, 1 << 30)
    );
    assert!(matches!(requests.reply(&reply(first[0].4, 0)), Ok(Answer::Piece)));
    let second = sent(&mut requests);
    assert_eq!((second.len(), second[0].2, second[0].3), (1, BLOCK + GIB, 1 << 30));
    // A piece that was answered is done; the one on its way is sent again.
    requests.lost();
    let second = sent(&mut requests);
    assert_eq!((second.len(), second[0].2, second[0].3), (1, BLOCK + GIB, 1 << 30));
    assert!(matches!(requests.reply(&reply(second[0].4, 0)), Ok(Answer::Piece)));
    let rest = sent(&mut requests);
    assert_eq!((rest.len(), rest[0].2, rest[0].3, rest[1].0), (2, BLOCK + 2 * GIB, 4096, command::WRITE));
    assert_eq!(result(requests.reply(&reply(rest[0].4, 0))), (1, Ok(())));
    // One that fails in the middle fails as a whole, and holds nobody up.
    requests.submit(request(3, Op::Unmap, 0, 3 * GIB));
    requests.submit(request(4, Op::Read, 0, BLOCK));
    let piece = sent(&mut requests);
    assert_eq!(result(requests.reply(&reply(piece[0].4, error::EIO))), (3, Err(IoError::Io)));
    assert_eq!(sent(&mut requests)[0].0, command::READ);
}

#[test]
fn errors_are_the_clients_but_an_end_is_not() {
    let mut requests = Requests::new(1);
    for (number, reason) in [
        (error::EIO, IoError::Io),
        (error::EINVAL, IoError::Invalid),
        (error::ENOSPC, IoError::NoSpace),
        (error::EPERM, IoError::ReadOnly),
        (error::ENOTSUP, IoError::NotSupported),
        (12, IoError::Io),
    ] {
        requests.submit(request(1, Op::Read, 0, BLOCK));
        let cookie = sent(&mut requests)[0].4;
        assert_eq!(result(requests.reply(&reply(cookie, number))), (1, Err(reason)));
    }
    requests.submit(request(2, Op::Flush, 0, 0));
    let cookie = sent(&mut requests)[0].4;
    assert_eq!(requests.reply(&reply(cookie, error::ESHUTDOWN)).unwrap_err(), Broken::Stopping);
    requests.lost();
    assert_eq!(sent(&mut requests)[0].0, command::FLUSH);
}

#[test]
fn a_read_ends_with_its_bytes() {
    let pool = Pool::new(1 << 20, 4 << 20).unwrap();
    let mut requests = Requests::new(2);
    requests.submit(request(3, Op::Read, 0, BLOCK));
    let cookie = sent(&mut requests)[0].4;
    let Ok(Answer::Data(place, len)) = requests.reply(&reply(cookie, 0)) else { panic!("a read has data") };
    assert_eq!((u64::from(len), requests.is_empty()), (BLOCK, false));
    let done = requests.data(place, pool.alloc(len, 1).unwrap()).unwrap();
    assert_eq!((done.tag, done.result, done.data.unwrap().len()), (3, Ok(()), 4096));
}

#[test]
fn bytes_that_are_no_reply_to_anything_break_the_connection_and_nothing_else() {
    let mut requests = Requests::new(4);
    requests.submit(request(1, WRITE, 0, BLOCK));
    let cookie = sent(&mut requests)[0].4;
    let mut magic = reply(cookie, 0);
    magic[3] ^= 1;
    assert!(matches!(requests.reply(&magic), Err(Broken::Magic(_))));
    for wrong in [cookie ^ 1, cookie ^ 1 << 32, u64::MAX, 0, cookie | 0xffff] {
        if wrong != cookie {
            assert_eq!(requests.reply(&reply(wrong, 0)).unwrap_err(), Broken::Cookie(wrong));
        }
    }
    assert_eq!(result(requests.reply(&reply(cookie, 0))), (1, Ok(())));
}

#[test]
fn what_is_given_up_ends_oldest_first() {
    let mut requests = Requests::new(3);
    (1..=3).for_each(|tag| requests.submit(request(tag, WRITE, 0, BLOCK)));
    let tags: Vec<u64> =
        std::iter::from_fn(|| requests.give_up(IoError::ShuttingDown)).map(|done| done.tag).collect();
    assert_eq!((tags, requests.is_empty()), (vec![1, 2, 3], true));
    assert!(requests.next_call().is_none());
}

#[test]
fn what_was_given_up_is_sent_by_no_connection() {
    let mut requests = Requests::new(8);
    for tag in 1..=4 {
        requests.submit(request(tag, if tag == 3 { Op::Read } else { WRITE }, tag * BLOCK, BLOCK));
    }
    // Not sent yet: it ends, and nobody hears of it.
    assert!(!requests.abandon(2) && !requests.abandon(99));
    assert_eq!(
        requests.abandoned().map(|done| (done.tag, done.result)),
        Some((2, Err(IoError::ShuttingDown)))
    );
    assert!(requests.abandoned().is_none());
    let offsets: Vec<u64> = sent(&mut requests).iter().map(|call| call.2).collect();
    assert_eq!(offsets, [BLOCK, 3 * BLOCK, 4 * BLOCK]);
    // The server has them: what it changes is to be called back, once.
    assert!(requests.abandon(4) && !requests.abandon(4));
    assert!(!requests.abandon(3), "a read harms nobody");
    assert!(requests.abandoned().is_none());
    requests.lost();
    let ended: Vec<u64> = std::iter::from_fn(|| requests.abandoned()).map(|done| done.tag).collect();
    assert_eq!(ended, [3, 4]);
    let offsets: Vec<u64> = sent(&mut requests).iter().map(|call| call.2).collect();
    assert_eq!(offsets, [BLOCK]);
}
