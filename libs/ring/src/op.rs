//! The table of operations in flight.
//!
//! An entry is taken when an operation is queued and given back at its terminal completion, and only then: until then
//! it holds the descriptor, the memory and the arguments that the kernel may read or write. Arguments never move:
//! they live in boxed blocks that the table only ever adds to. Entries are recycled last in, first out, so that a
//! steady load neither allocates nor touches more of the table than it has operations in flight.

use std::cell::UnsafeCell;
use std::rc::Rc;

use io_uring::types::Timespec;

use crate::payload::IOVECS;
use crate::rx::RxShared;
use crate::tx::TxShared;
use crate::{Bell, Fd, Payload, Token};

/// Bytes of a head that is copied into the operation.
pub(crate) const HEAD: usize = 64;

const BLOCK: usize = 32;
const END: u32 = u32::MAX;

/// What the kernel reads and writes besides payload memory.
pub(crate) struct Args {
    pub(crate) iovecs: [libc::iovec; IOVECS],
    pub(crate) message: libc::msghdr,
    pub(crate) head: [u8; HEAD],
    pub(crate) time: Timespec,
    /// Counter of an eventfd.
    pub(crate) count: u64,
}

impl Args {
    fn new() -> Self {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: msghdr is a plain C structure of integers and pointers, for which all-zero is a valid value.
        let message = unsafe { std::mem::zeroed() };
        Self { iovecs: [nothing; IOVECS], message, head: [0; HEAD], time: Timespec::new(), count: 0 }
    }
}

/// What an operation keeps alive beside its descriptor, and what its completion means.
pub(crate) enum Hold {
    /// Nothing.
    Nothing,
    /// A timer: running out is its success.
    Timer,
    /// The result is a new descriptor.
    Accept,
    /// The kernel reads this memory.
    Keep(#[expect(dead_code, reason = "held for the kernel, never read")] Payload),
    /// The kernel writes into this memory, and the completion gives it back.
    GiveBack(Payload),
    /// The kernel fills the free part of this stream.
    Receive(Rc<RxShared>),
    /// The kernel reads what this queue has in flight.
    Send(Rc<TxShared>),
    /// A read of a bell's counter, queued anew after each ring; and how often in a row it has failed.
    Bell(Bell, u32),
}

pub(crate) struct Op {
    pub(crate) token: Token,
    pub(crate) fd: Option<Fd>,
    pub(crate) hold: Hold,
    /// The caller does not want any more completions of it.
    pub(crate) cancelled: bool,
    live: bool,
    /// Counts the uses of the entry, so that a stale completion is told from the current one.
    generation: u32,
    next_free: u32,
}

/// See the module's head.
pub(crate) struct Table {
    ops: Vec<Op>,
    args: Vec<Box<[UnsafeCell<Args>; BLOCK]>>,
    free: u32,
    live: usize,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self { ops: Vec::new(), args: Vec::new(), free: END, live: 0 }
    }

    /// Entries in use.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Takes an entry: its user data for the kernel, and its arguments, which nobody else has until it is queued.
    pub(crate) fn take(&mut self, token: Token, fd: Option<Fd>) -> (u64, *mut Args) {
        if self.free == END {
            self.grow();
        }
        let index = self.free;
        let op = &mut self.ops[index as usize];
        self.free = op.next_free;
        (op.token, op.fd, op.cancelled, op.live) = (token, fd, false, true);
        op.generation = op.generation.wrapping_add(1);
        self.live += 1;
        let user_data = u64::from(op.generation) << 32 | u64::from(index);
        (user_data, self.args(user_data))
    }

    /// Says what the operation keeps alive.
    pub(crate) fn hold(&mut self, user_data: u64, hold: Hold) {
        self.ops[Self::index(user_data)].hold = hold;
    }

    fn grow(&mut self) {
        let block = Box::new(std::array::from_fn(|_| UnsafeCell::new(Args::new())));
        self.args.push(block);
        for _ in 0..BLOCK {
            let index = u32::try_from(self.ops.len()).expect("fewer than 2^32 operations in flight");
            self.ops.push(Op {
                token: Token::default(),
                fd: None,
                hold: Hold::Nothing,
                cancelled: false,
                live: false,
                generation: 0,
                next_free: self.free,
            });
            self.free = index;
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half is the index")]
    fn index(user_data: u64) -> usize {
        user_data as u32 as usize
    }

    /// The arguments of an entry: valid until the table is dropped, whatever else is done with it.
    pub(crate) fn args(&self, user_data: u64) -> *mut Args {
        let index = Self::index(user_data);
        self.args[index / BLOCK][index % BLOCK].get()
    }

    /// The operation of this user data, if it is still in flight.
    pub(crate) fn get(&mut self, user_data: u64) -> Option<&mut Op> {
        let op = self.ops.get_mut(Self::index(user_data))?;
        (op.live && u64::from(op.generation) == user_data >> 32).then_some(op)
    }

    /// Gives an entry back at its terminal completion: what it held.
    pub(crate) fn give_back(&mut self, user_data: u64) -> (Option<Fd>, Hold) {
        let index = Self::index(user_data);
        let op = &mut self.ops[index];
        debug_assert!(op.live);
        op.live = false;
        op.next_free = self.free;
        #[expect(clippy::cast_possible_truncation, reason = "made from 32 bits")]
        let free = index as u32;
        self.free = free;
        self.live -= 1;
        (op.fd.take(), std::mem::replace(&mut op.hold, Hold::Nothing))
    }

    /// User data of every operation in flight that carries the token, or of all.
    pub(crate) fn find(&mut self, token: Option<Token>) -> impl Iterator<Item = (u64, &mut Op)> {
        self.ops.iter_mut().enumerate().filter_map(move |(index, op)| {
            let wanted = op.live && token.is_none_or(|t| t == op.token);
            wanted.then_some((u64::from(op.generation) << 32 | index as u64, op))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_completion_is_not_taken_for_the_next_operation() {
        let mut table = Table::new();
        let (first, args) = table.take(Token::default(), None);
        assert!(table.get(first).is_some());
        table.give_back(first);
        assert!(table.get(first).is_none());
        let (second, same_args) = table.take(Token::new(1, 2, 3, 4), None);
        assert_eq!(args, same_args, "entries are used again, last in, first out");
        assert!(table.get(first).is_none());
        assert_eq!(table.get(second).map(|op| op.token), Some(Token::new(1, 2, 3, 4)));
        assert_eq!(table.live(), 1);
    }

    #[test]
    fn arguments_never_move() {
        let mut table = Table::new();
        let all: Vec<_> = (0..1000).map(|_| table.take(Token::default(), None)).collect();
        assert!(all.iter().all(|(user_data, args)| table.args(*user_data) == *args));
        assert_eq!(table.find(None).count(), 1000);
    }
}
