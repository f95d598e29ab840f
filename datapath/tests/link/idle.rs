//! A frontend whose request ends an idle time of the queue.

use std::time::Duration;

use datapath::link::EngineQueue;
use datapath::queue::Tally;
use lh_block::{Device, Extent, Op, Request};
use lh_ring::{Completion, Frontend, OWNER_FRONTEND, Overseer, Payload, Ring, Token, run_queue};

use crate::bench::Bench;

/// The queue's ticks, each of which reads the clock, end a second after the last request.
const IDLE: Duration = Duration::from_secs(4);

/// How long the request may take, which a busy machine makes longer.
const TOOK: Duration = Duration::from_secs(2);

/// Submits a read when its own operation completes, as those do that take requests from the kernel.
#[derive(Debug, Default)]
struct Late {
    is_armed: bool,
    is_answered: bool,
}

impl Frontend for Late {
    fn completion(&mut self, _: &mut Ring, device: &mut dyn Device<Payload>, _: Completion) {
        device.submit(Request { tag: 1, op: Op::Read, range: Extent::new(0, 4096), data: None });
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        if !std::mem::replace(&mut self.is_armed, true) {
            ring.timeout(Token::new(OWNER_FRONTEND, 0, 0, 0), IDLE);
        }
        self.is_answered |= device.poll_done().is_some();
    }
}

/// Ends the loop with the answer.
struct UntilAnswered;

impl Overseer<EngineQueue, Late> for UntilAnswered {
    fn oversee(&mut self, _: &mut Ring, _: &mut EngineQueue, late: &mut Late) -> bool {
        !late.is_answered
    }
}

/// Else the first request would be counted as long as the volume was idle, and its replica as that slow.
#[test]
fn the_time_before_a_request_is_not_a_part_of_its_latency() {
    let mut b = Bench::new(1, false);
    run_queue(&mut b.driven.ring, &mut b.driven.device, &mut Late::default(), &mut UntilAnswered)
        .expect("the ring turns");
    for stats in [&b.stats.reads, &b.stats.member_reads[0]] {
        let mut tally = Tally::default();
        stats.add_to(&mut tally);
        let took = Duration::from_nanos(tally.mean());
        assert!(tally.count == 1 && took < TOOK, "{} reads, {took:?}", tally.count);
    }
}
