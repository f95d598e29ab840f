//! Clients that give up on a connection: what is left there was sent again on another one, to another queue, and something newer
//! after it.

use super::{DEPTH, Event, MS, Outbox, World, blocks};

impl World {
    /// A client gives up on a write that has no answer yet, and sends another one in its place.
    pub(super) fn give_up(&mut self, out: &mut Outbox) {
        if self.at_peace || self.budget == 0 {
            return;
        }
        let again = self.now + self.dice.between(MS / 10, 20 * MS);
        out.later(again, Event::GiveUp);
        let number = self.current;
        let Some(e) = self.engines.get(&number).filter(|e| e.open && !e.frozen) else { return };
        let waiting: Vec<_> = e
            .slots
            .iter()
            .enumerate()
            .flat_map(|(q, slots)| (0_u16..).zip(slots).map(move |(slot, s)| (q, slot, s)))
            .filter(|(_, _, s)| s.taken && !s.left && !s.writes.is_empty() && s.request.is_some())
            .map(|(q, slot, _)| (q, slot))
            .collect();
        let Some((q, slot)) = self.dice.pick(&waiting) else { return };
        let other = 1 - q;
        let Some(e) = self.engines.get_mut(&number) else { return };
        let free = e.slots[other].iter().position(|s| !s.taken).and_then(|s| u16::try_from(s).ok());
        let Some(place) = free.filter(|s| *s < DEPTH) else { return };
        let s = &mut e.slots[q][usize::from(slot)];
        let Some((op, range)) = s.request else { return };
        s.left = true;
        let (uses, mut before) = (s.uses, s.writes.clone());
        before.extend(&s.instead_of);
        self.note("client left".into());
        let within = if self.dice.chance(500) { MS } else { 2000 * MS };
        let noticed = self.now + self.dice.below(within);
        out.later(noticed, Event::HangUp(number, q, slot, uses));
        self.say(|| format!("e{number} q{q}/{slot} is given up: {op:?} {:?}", blocks(range)));
        self.issue_into((number, other, place), op, range, out);
        if let Some(e) = self.engines.get_mut(&number) {
            e.slots[other][usize::from(place)].instead_of = before;
        }
    }

    /// What a queue's thread does when it has a processor.
    pub(super) fn queue_turns(&mut self, number: u64, event: &Event, out: &mut Outbox) {
        let now = self.now;
        let Some(e) = self.engines.get_mut(&number) else { return };
        match *event {
            Event::HangUp(_, q, slot, uses) => e.hangs_up(now, q, slot, uses, out),
            Event::LetIn(_, q) => e.let_in(now, q, out),
            Event::Submit(_, q, slot) => e.submit(now, q, slot, out),
            Event::TurnDue(_, q) => {
                let late = if self.dice.chance(700) { MS / 10 } else { 30 * MS };
                out.later(now + self.dice.below(late), Event::LetIn(number, q));
            }
            _ => {}
        }
    }
}
