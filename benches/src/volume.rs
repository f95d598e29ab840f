//! A queue machine over members that answer at once.

use std::sync::Arc;

use datapath::message::{MemberId, QueueId, Switch, SwitchId, ToQueue};
use datapath::order::Table;
use datapath::queue::{Config, Data, Input, Output, Queue, Reply, Transmit};
use datapath::shared::Shared;
use lh_block::{Extent, Op};
use lh_wire::{OpCode, Status};

const SIZE: u64 = VolumeRig::SIZE;

/// Time that passes with every request, ns. A second's worth of requests needs some pings, as in life.
const STEP: u64 = 1000;

/// A queue with its members, in one thread.
#[derive(Debug)]
pub struct VolumeRig {
    queue: Queue,
    now: u64,
    out: Vec<Output>,
    /// Sent and not answered.
    wire: Vec<Transmit>,
    /// What each member holds; empty: members answer without keeping anything.
    memories: Vec<Vec<u8>>,
    /// What a client writes.
    data: Vec<u8>,
    answers: u64,
}

impl VolumeRig {
    /// Bytes of the volume: enough that random places are hardly ever the same twice in a row.
    pub const SIZE: u64 = 64 << 20;

    /// An open queue with so many members. With `keeps_data` each member copies what is written into its own memory,
    /// and what is read out of it.
    pub fn new(members: u8, keeps_data: bool) -> Self {
        let config = Config {
            size: SIZE,
            logical_block: 512,
            max_transfer: 1 << 20,
            depth: 128,
            io_timeout_ns: 0,
            verify: false,
        };
        let queue =
            Queue::new(config, QueueId(0), Arc::new(Table::new()), Arc::new(Shared::new(SIZE, 4 << 20)));
        let memory = || vec![0; bytes(SIZE)];
        let mut rig = Self {
            queue,
            now: 1_000_000_000,
            out: Vec::with_capacity(256),
            wire: Vec::with_capacity(512),
            memories: (0..members).filter(|_| keeps_data).map(|_| memory()).collect(),
            data: vec![0x5a; 1 << 20],
            answers: 0,
        };
        let mut id = 0;
        let mut switch = |rig: &mut Self, switch| {
            id += 1;
            rig.apply(Input::Message(ToQueue::Switch(SwitchId(id), switch)));
        };
        for member in (0..members).map(MemberId) {
            rig.apply(Input::LinkUp { member });
            switch(&mut rig, Switch::Attach { member });
            switch(&mut rig, Switch::Promote { member });
        }
        switch(&mut rig, Switch::Resume);
        rig.answer_everything();
        rig
    }

    /// Requests of 4 KiB at these places, all in flight at once, each to its end. At most 128, in places that differ.
    ///
    /// # Panics
    /// If one is not answered.
    pub fn do_all(&mut self, op: Op, places: impl IntoIterator<Item = u64>) {
        let before = self.answers;
        let mut asked = 0;
        for (slot, offset) in (0..).zip(places) {
            self.now += STEP;
            self.apply(Input::Request { slot, op, range: Extent::new(offset, lh_block::BLOCK) });
            asked += 1;
        }
        self.answer_everything();
        assert_eq!(self.answers - before, asked, "a request was not answered");
    }

    /// A write of 4 KiB to its end.
    pub fn write(&mut self, offset: u64) {
        self.do_all(Op::Write { fua: false }, [offset]);
    }

    /// A read of 4 KiB to its end.
    pub fn read(&mut self, offset: u64) {
        self.do_all(Op::Read, [offset]);
    }

    fn apply(&mut self, input: Input) {
        self.queue.apply(self.now, input, &mut self.out);
        if self.queue.lets_in() {
            self.queue.apply(self.now, Input::LetIn, &mut self.out);
        }
        while let Some(output) = self.out.pop() {
            match output {
                Output::Send(message) => self.wire.push(message),
                Output::Complete { slot, result, held, .. } => {
                    assert_eq!(result, Ok(()), "an error of the machine");
                    self.answers += 1;
                    if held {
                        self.queue.apply(self.now, Input::Answered { slot }, &mut self.out);
                    }
                }
                Output::Free { .. } | Output::Report(_) | Output::Store { .. } => {}
                other => panic!("not in a healthy volume: {other:?}"),
            }
        }
    }

    fn answer_everything(&mut self) {
        while let Some(message) = self.wire.pop() {
            let reply = self.answer(&message);
            self.apply(Input::Reply(reply));
        }
    }

    /// The member does it.
    fn answer(&mut self, message: &Transmit) -> Reply {
        let Transmit { member, tag, op, range, data, .. } = *message;
        if let Some(memory) = self.memories.get_mut(usize::from(member.0)) {
            let place = bytes(range.offset)..bytes(range.end());
            match (op, data) {
                (OpCode::Write, Data::Client { from, .. }) => {
                    let from = bytes(from.into());
                    memory[place].copy_from_slice(&self.data[from..from + bytes(range.len)]);
                }
                (OpCode::Read, _) => self.data[..bytes(range.len)].copy_from_slice(&memory[place]),
                _ => {}
            }
        }
        let payload = if op == OpCode::Read { u32::try_from(range.len).unwrap_or(0) } else { 0 };
        Reply { member, tag, op, status: Status::Ok, aux: 0, payload }
    }
}

fn bytes(n: u64) -> usize {
    usize::try_from(n).unwrap_or_else(|_| unreachable!("volumes here are small"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_on_every_member_and_read_from_one() {
        let mut rig = VolumeRig::new(3, true);
        rig.write(8192);
        for memory in &rig.memories {
            assert!(memory[8192..12288].iter().all(|b| *b == 0x5a) && memory[12288] == 0);
        }
        rig.data.fill(0);
        rig.read(8192);
        assert!(rig.data[..4096].iter().all(|b| *b == 0x5a));
    }

    #[test]
    fn a_full_queue_is_answered() {
        let mut rig = VolumeRig::new(3, false);
        rig.do_all(Op::Write { fua: false }, (0..128).map(|n| n << 16));
        assert_eq!(rig.answers, 128);
    }
}
