//! Messages to a queue thread from other threads.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::Bell;

/// Where any thread leaves messages for one loop. Clones put into the same [`Inbox`].
///
/// # Ordering
/// - Messages of one thread arrive in the order in which it put them. Those of several threads arrive interleaved; one that
///   was put because of another one comes after it.
/// - The message is in the box before the bell rings, and a loop hears the bell ([`crate::Ring::next`]) before it looks into
///   the box again. So none is left behind: what a loop has not found, when it looked for the last time before it went to
///   sleep, wakes it. What it finds earlier wakes it for nothing.
/// - Messages that are put before the loop has heard the bell cost one system call and one completion together ([`Bell`]). A
///   completion says that something may be there, not how much: the loop takes until nothing is left.
#[derive(Debug)]
pub struct Mailbox<M> {
    sender: Sender<M>,
    bell: Bell,
}

/// The loop's end of a [`Mailbox`]; may be sent to its thread.
#[derive(Debug)]
pub struct Inbox<M> {
    receiver: Receiver<M>,
    bell: Bell,
}

impl<M> Mailbox<M> {
    /// An empty mailbox and its other end.
    ///
    /// # Errors
    /// The system's, when there is no descriptor left for the bell.
    pub fn new() -> io::Result<(Self, Inbox<M>)> {
        let (sender, receiver) = channel();
        let bell = Bell::new()?;
        Ok((Self { sender, bell: bell.clone() }, Inbox { receiver, bell }))
    }

    /// Puts a message in and wakes the loop. Never waits. When the [`Inbox`] is gone the message is dropped: its thread has
    /// ended, and nobody needs to know that to end, too.
    pub fn put(&self, message: M) {
        if self.sender.send(message).is_ok() {
            self.bell.ring();
        }
    }

    /// Wakes the loop without a message: what it looks at in every turn has changed.
    pub fn wake(&self) {
        self.bell.ring();
    }
}

// A derived one would ask for messages that can be cloned.
impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), bell: self.bell.clone() }
    }
}

impl<M> Inbox<M> {
    /// What the loop's ring has to be told to [`crate::Ring::wake_on`].
    pub const fn bell(&self) -> &Bell {
        &self.bell
    }

    /// The next message; never waits. With nothing there it is `None`, also when every [`Mailbox`] is gone: that does not
    /// ring, so a loop that is to end is told so by a message.
    pub fn take(&mut self) -> Option<M> {
        self.receiver.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
    use std::rc::Rc;
    use std::thread;
    use std::time::Duration;

    use lh_block::{Device, Done, Geometry, Request};

    use super::*;
    use crate::{Completion, NoFrontend, Overseer, Payload, Pool, QueueDevice, Ring, Token, run_queue};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A ring that hears the inbox's bell, as a queue thread's does.
    fn hearing<M>(inbox: &Inbox<M>) -> Ring {
        let mut ring = Ring::new(4).unwrap();
        ring.wake_on(Token::new(0, 0, 0, 0), inbox.bell());
        ring
    }

    /// Sleeps until the bell rings; how often it was heard.
    fn sleep(ring: &mut Ring, most: Duration) -> usize {
        ring.turn(Some(most)).unwrap();
        std::iter::from_fn(|| ring.next()).inspect(|c| assert!(c.result.is_ok(), "{c:?}")).count()
    }

    /// System calls of those who rang and were not heard yet: each adds one to the eventfd.
    fn calls(bell: &Bell) -> u64 {
        let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", bell.raw())).unwrap();
        let count = told.lines().find_map(|line| line.strip_prefix("eventfd-count:")).unwrap();
        u64::from_str_radix(count.trim(), 16).unwrap()
    }

    #[test]
    fn a_message_that_comes_as_the_loop_goes_to_sleep_wakes_it() {
        let (mailbox, mut inbox) = Mailbox::new().unwrap();
        let mut ring = hearing(&inbox);
        for message in 0..3 {
            assert_eq!(inbox.take(), None, "the last look before the loop sleeps");
            mailbox.put(message);
            assert_eq!(sleep(&mut ring, PATIENCE), 1, "it slept over message {message}");
            assert_eq!(inbox.take(), Some(message));
        }
        mailbox.wake();
        assert_eq!(sleep(&mut ring, PATIENCE), 1);
        assert_eq!(inbox.take(), None);
    }

    #[test]
    fn a_loop_that_sleeps_is_woken_for_every_message_of_every_thread() {
        const EACH: u32 = 5_000;
        let (mailbox, mut inbox) = Mailbox::new().unwrap();
        let mut ring = hearing(&inbox);
        let threads = [0, 1].map(|sender| {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                for number in 0..EACH {
                    mailbox.put((sender, number));
                    if number % 8 == 0 {
                        thread::yield_now();
                    }
                }
            })
        });
        let mut next = [0; 2];
        while next != [EACH; 2] {
            assert!(sleep(&mut ring, PATIENCE) > 0, "it slept over messages after {next:?}");
            while let Some((sender, number)) = inbox.take() {
                assert_eq!(number, next[sender], "out of order");
                next[sender] += 1;
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }

    /// Puts another file behind the bell's descriptor.
    fn replace(bell: &Bell, by: &OwnedFd) {
        // SAFETY: both descriptors are open, and stay their owners'.
        assert!(unsafe { libc::dup2(by.as_raw_fd(), bell.raw()) } >= 0);
    }

    /// One that cannot be read.
    fn unreadable() -> OwnedFd {
        fs::File::options().write(true).open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_loop_whose_bell_could_not_be_read_for_a_moment_is_woken_afterwards() {
        let (mailbox, mut inbox) = Mailbox::new().unwrap();
        // SAFETY: the bell keeps it open.
        let own = unsafe { BorrowedFd::borrow_raw(inbox.bell().raw()) }.try_clone_to_owned().unwrap();
        replace(inbox.bell(), &unreadable());
        let mut ring = hearing(&inbox);
        for _ in 0..3 {
            assert_eq!(sleep(&mut ring, Duration::from_millis(10)), 0, "nobody has rung");
        }
        replace(inbox.bell(), &own);
        for message in 0..3 {
            mailbox.put(message);
            assert_eq!(sleep(&mut ring, PATIENCE), 1, "it slept over message {message}");
            assert_eq!(inbox.take(), Some(message));
        }
    }

    #[test]
    fn a_loop_whose_bell_cannot_be_read_ends_with_an_error() {
        let (_mailbox, inbox) = Mailbox::<()>::new().unwrap();
        replace(inbox.bell(), &unreadable());
        let (mut ring, pool) = (Ring::new(4).unwrap(), Pool::new(1 << 20, 1 << 20).unwrap());
        let mut device = Nothing { inbox, pool, turns: 0 };
        let error = run_queue(&mut ring, &mut device, &mut NoFrontend, &mut Patient).unwrap_err();
        assert!(error.to_string().contains("eventfd"), "{error}");
    }

    /// A device that nobody asks for anything.
    struct Nothing {
        inbox: Inbox<()>,
        pool: Pool,
        turns: u32,
    }

    impl Device<Payload> for Nothing {
        fn geometry(&self) -> Geometry {
            Geometry { size: 0, logical_block: 512, physical_block: 4096, max_transfer: 4096, depth: 1 }
        }
        fn room(&self) -> u32 {
            0
        }
        fn submit(&mut self, _: Request<Payload>) {}
        fn poll_done(&mut self) -> Option<Done<Payload>> {
            None
        }
    }

    impl QueueDevice for Nothing {
        fn bell(&self) -> &Bell {
            self.inbox.bell()
        }
        fn pool(&self) -> &Pool {
            &self.pool
        }
        fn is_ending(&self) -> bool {
            false
        }
        fn begin_turn(&mut self) {
            self.turns += 1;
        }
        fn end_turn(&mut self, _: &mut Ring) -> Option<Duration> {
            Some(Duration::from_millis(10))
        }
        fn completion(&mut self, _: Completion) {}
    }

    /// Ends a loop that does not end by itself.
    struct Patient;

    impl Overseer<Nothing, NoFrontend> for Patient {
        fn oversee(&mut self, _: &mut Ring, device: &mut Nothing, _: &mut NoFrontend) -> bool {
            device.turns < 500
        }
    }

    #[test]
    fn messages_before_the_bell_is_heard_cost_one_system_call() {
        let (mailbox, mut inbox) = Mailbox::new().unwrap();
        let other = mailbox.clone();
        for message in 0..100 {
            if message % 2 == 0 { mailbox.put(message) } else { other.put(message) }
        }
        assert_eq!(calls(inbox.bell()), 1);
        let mut ring = hearing(&inbox);
        assert_eq!(sleep(&mut ring, PATIENCE), 1);
        assert!(std::iter::from_fn(|| inbox.take()).eq(0..100));
        assert_eq!(sleep(&mut ring, Duration::from_millis(1)), 0, "nobody has rung since");
    }

    #[test]
    fn what_is_put_where_nobody_looks_is_dropped_and_rings_nothing() {
        let (mailbox, inbox) = Mailbox::new().unwrap();
        let bell = inbox.bell().clone();
        let message = Rc::new(());
        let mut ring = hearing(&inbox);
        mailbox.put(message.clone());
        assert_eq!(sleep(&mut ring, PATIENCE), 1);
        drop(inbox);
        assert_eq!(Rc::strong_count(&message), 1, "what nobody has taken goes with the inbox");
        drop(ring);
        mailbox.put(message.clone());
        assert_eq!((Rc::strong_count(&message), calls(&bell)), (1, 0));
        mailbox.wake();
        assert_eq!(calls(&bell), 1);
    }
}
