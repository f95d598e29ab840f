//! What a queue's driver keeps, and for how long.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::*;
use crate::message::Fault;
use crate::order::Table;
use crate::queue::Config;
use crate::shared::Shared;

mod local_reads;
mod replicas;

const A: MemberId = MemberId(0);

/// A queue without a ring, and what it tells.
fn queue() -> (EngineQueue, Receiver<News>) {
    queue_with(0)
}

fn queue_with(io_timeout_ns: u64) -> (EngineQueue, Receiver<News>) {
    let size = 8 << 20;
    let config =
        Config { size, logical_block: 512, max_transfer: 1 << 20, depth: 8, io_timeout_ns, verify: false };
    let geometry =
        Geometry { size, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 8 };
    let shared = Arc::new(Shared::new(size, 4 << 20));
    let (mailbox, inbox) = Mailbox::new().unwrap();
    let (sender, news) = crossbeam_channel::unbounded();
    let parts = Parts {
        queue: Queue::new(config, QueueId(0), Arc::new(Table::new()), shared),
        id: QueueId(0),
        generation: Generation::from(1 << 32),
        geometry,
        inbox,
        peers: vec![mailbox],
        news: sender,
        offer: Offer::default(),
    };
    (EngineQueue::new(parts, &Pool::new(1 << 20, 4 << 20).unwrap()), news)
}

fn ask(queue: &mut EngineQueue, id: u64) {
    queue.take(Mail::Control(ControlId(id), vec![b' '; 4096]));
    queue.take(Mail::Message(ToQueue::Control(ControlId(id), A)));
}

fn lost(news: &Receiver<News>) -> Vec<u64> {
    let lost = |news| match news {
        News::Report(_, FromQueue::ControlLost(id, _)) => Some(id.0),
        _ => None,
    };
    news.try_iter().filter_map(lost).collect()
}

/// A replica that comes and goes would else cost memory each time, for as long as the engine runs.
#[test]
fn control_requests_go_with_the_link_that_lost_them() {
    let (mut queue, news) = queue();
    ask(&mut queue, 1);
    assert_eq!((lost(&news), queue.slots.controls()), (vec![1], 0), "there was no link");
    let (near, _far) = UnixStream::pair().unwrap();
    queue.take(Mail::Link { member: A, socket: near.into(), checksums: false, lends: false, tells: false });
    ask(&mut queue, 2);
    ask(&mut queue, 3);
    assert_eq!((lost(&news), queue.slots.controls()), (vec![], 2), "they are on their way");
    queue.take(Mail::Close(A));
    assert_eq!((lost(&news), queue.slots.controls()), (vec![2, 3], 0));
}

/// A replica would write other bytes than it was sent.
#[test]
#[should_panic(expected = "of another pool")]
fn bytes_of_another_pool_are_not_lent() {
    let (near, _far) = UnixStream::pair().unwrap();
    let pools = [Pool::lendable(1 << 20, 4 << 20).unwrap(), Pool::lendable(1 << 20, 4 << 20).unwrap()];
    let terms = Terms { checksums: false, lends: true, tells: false };
    let mut connection = Connection::new(near.into(), 1, terms, &pools[0]);
    let transmit = crate::queue::Transmit {
        member: A,
        tag: 1,
        op: lh_wire::OpCode::Write,
        range: Extent::new(0, 1 << 16),
        fua: false,
        verify: false,
        flush: 0,
        aux: 0,
        data: crate::queue::Data::None,
    };
    for pool in &pools {
        let payload = pool.alloc(1 << 16, 4096).unwrap();
        connection.push(&transmit, Generation::from(1 << 32), data::Body::Payload(payload, None));
    }
}

/// Else it would take members for heard just now who were heard before the host was suspended.
#[test]
fn its_time_goes_on_while_the_host_is_suspended() {
    lh_rig::on_a_host_that_was_suspended(|| assert!(queue().0.began >= lh_rig::SUSPENDED));
}

/// Else the end of a connection that is gone would end the one in its place.
#[test]
fn what_an_older_connection_ends_with_is_not_the_new_ones() {
    let (mut queue, news) = queue();
    let _far = [(), ()].map(|()| {
        let (near, far) = UnixStream::pair().unwrap();
        queue.take(Mail::Link {
            member: A,
            socket: near.into(),
            checksums: false,
            lends: false,
            tells: false,
        });
        far
    });
    let lost = || {
        let of_link = |n: &News| matches!(n, News::Report(_, FromQueue::Failed(A, Fault::Link)));
        news.try_iter().filter(of_link).count()
    };
    assert_eq!(lost(), 1, "another one is in its place");
    let mut ends = |number| {
        let token = Token::new(OWNER_DEVICE, 0, 0, number);
        queue.completion(Completion { token, result: Ok(0), more: false, payload: None, accepted: None });
    };
    ends(1);
    assert_eq!(lost(), 0);
    ends(2);
    assert_eq!(lost(), 1);
}

/// A member of a version that does not know the question would end the session.
#[test]
fn who_does_not_tell_which_blocks_hold_data_is_not_asked() {
    use std::io::Read;

    use crate::message::{Switch, SwitchId};

    for tells in [false, true] {
        let (mut queue, _news) = queue();
        let (near, mut far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        queue.take(Mail::Link { member: A, socket: near.into(), checksums: false, lends: false, tells });
        let switches = [Switch::Attach { member: A }, Switch::Promote { member: A }, Switch::Resume];
        for (n, switch) in (1..).zip(switches) {
            queue.take(Mail::Message(ToQueue::Switch(SwitchId(n), switch)));
        }
        let (op, range) = (lh_block::Op::Allocation, Extent::new(0, 1 << 20));
        queue.submit(Request { tag: 7, op, range, data: None });
        let mut ring = Ring::new(8).unwrap();
        let wait = queue.end_turn(&mut ring);
        ring.turn(Some(Duration::from_millis(30))).unwrap();
        let sent = far.read(&mut [0; 64]).is_ok();
        let answer = queue.poll_done().map(|done| (done.tag, done.result, done.data.is_some()));
        let unknown = (7, Ok(()), false);
        assert_eq!((sent, answer), if tells { (true, None) } else { (false, Some(unknown)) });
        assert!(tells || wait == Some(Duration::ZERO), "the answer is not left lying");
    }
}
