//! Connections, handshakes, and how long everything takes.

use super::{
    Conducted, Conn, ConnId, ConnectError, Event, HANDSHAKE, Handshake, Instance, MS, Mail, MemberId, Outbox,
    Packet, QUEUES, QueueId, Report, SessionHello, Verdict, World,
};

impl World {
    pub(super) fn engine_packet(&mut self, number: u64, conn: ConnId, packet: Packet, out: &mut Outbox) {
        let now = self.now;
        let pending = self.handshakes.iter().find(|(_, h)| h.conns.contains(&conn)).map(|(k, _)| *k);
        match (packet, pending) {
            (Packet::Verdict(Verdict::Welcome), Some(key)) => {
                let Some(h) = self.handshakes.get_mut(&key) else { return };
                h.welcome += 1;
                if h.welcome == h.conns.len() {
                    let (conns, hello) = (std::mem::take(&mut h.conns), h.hello);
                    self.handshakes.remove(&key);
                    // When all queues have their links.
                    out.later(now + 25 * MS, Event::AskGrant(number, key.1, hello));
                    for (q, conn) in (0_u8..).zip(conns) {
                        out.queue_gets(number, QueueId(q), Mail::Link(key.1, conn));
                    }
                    let input = Conducted::Connected { member: key.1, session: key.2 };
                    out.conductor_gets(number, usize::from(QUEUES), Report::Input(input));
                }
            }
            (Packet::Verdict(verdict), Some(key)) => {
                let why = match verdict {
                    Verdict::Stale => {
                        out.note("fence refused an engine", 1);
                        ConnectError::Stale(self.generation)
                    }
                    other => ConnectError::Refused(format!("{other:?}")),
                };
                self.handshake_failed(number, key.1, key.2, why, out);
            }
            (Packet::End, Some(key)) => {
                let why = ConnectError::Unreachable("connection closed".into());
                self.handshake_failed(number, key.1, key.2, why, out);
            }
            (Packet::Grant(grant), _) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.is_granted(conn, &grant, out);
                }
            }
            (Packet::End, None)
                if self.engines.get(&number).is_some_and(|e| e.grant_conns.contains_key(&conn)) =>
            {
                let ended = self.engines.get_mut(&number).and_then(|e| e.grant_ends(conn, out));
                if let Some((member, hello)) = ended {
                    let pause = self.dice.between(5 * MS, 300 * MS);
                    out.later(now + pause, Event::AskGrant(number, member, hello));
                }
            }
            (Packet::End, None) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.broken(now, conn, out);
                }
            }
            (Packet::Message(header, body), _) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.message(now, conn, header, body, out);
                }
            }
            _ => {}
        }
    }

    /// Asks for a replica's files, unless the session is over.
    pub(super) fn ask_grant(&mut self, engine: u64, member: MemberId, hello: SessionHello) {
        self.conn_count += 1;
        let conn = ConnId(self.conn_count);
        let Some(e) = self.engines.get_mut(&engine) else { return };
        let asked = e.grant_conns.values().any(|(asked, ..)| *asked == member);
        if asked || self.sessions.get(&(engine, member)) != Some(&hello.session) {
            return;
        }
        if !e.is_linked(member) {
            // Its links are on their way, or are gone: in the end there is another session.
            return;
        }
        e.grant_conns.insert(conn, (member, hello, 0));
        let node = usize::from(member.0);
        self.conns.insert(conn, Conn { engine, node, to_node: 0, to_engine: 0, closed: false });
        self.node_gets(conn, Packet::Ask(hello));
    }

    pub(super) fn handshake_failed(
        &mut self,
        number: u64,
        member: MemberId,
        session: u64,
        why: ConnectError,
        out: &mut Outbox,
    ) {
        let Some(h) = self.handshakes.remove(&(number, member, session)) else { return };
        for conn in h.conns {
            out.close(conn);
        }
        let input = Conducted::ConnectFailed { member, session, why };
        out.conductor_gets(number, usize::from(QUEUES), Report::Input(input));
    }

    pub(super) fn delay(&mut self) -> u64 {
        if self.dice.chance(20) { self.dice.between(MS, 50 * MS) } else { self.dice.between(MS / 30, MS / 3) }
    }

    pub(super) fn fifo_mail(&mut self, engine: u64, q: usize) -> u64 {
        let delay = if self.dice.chance(50) {
            self.dice.between(MS, 20 * MS)
        } else {
            self.dice.between(MS / 200, MS / 5)
        };
        let last = self.mail_at.entry((engine, q)).or_default();
        *last = (*last).max(self.now + delay);
        *last
    }

    pub(super) fn node_gets(&mut self, conn: ConnId, packet: Packet) {
        let delay = self.delay();
        let cut = self.cut(conn);
        let Some(c) = self.conns.get_mut(&conn).filter(|c| !c.closed) else { return };
        c.to_node = c.to_node.max(self.now + delay).max(cut);
        let at = c.to_node;
        self.at(at, Event::ToNode(conn, packet));
    }

    /// Nothing passes over the connection before this time.
    pub(super) fn cut(&self, conn: ConnId) -> u64 {
        let Some(c) = self.conns.get(&conn) else { return 0 };
        let apart = self.isolated.filter(|(engine, near, _)| (*engine == c.engine) != (*near == c.node));
        self.cut_until[c.node].max(apart.map_or(0, |(.., until)| until))
    }

    pub(super) fn connect(&mut self, engine: u64, member: MemberId, session: u64) {
        let Some(e) = self.engines.get(&engine) else { return };
        let (generation, instance) = (e.generation, e.instance);
        let number = Instance(u128::from(self.dice.number()));
        let mut conns = Vec::new();
        for queue in 0..u16::from(QUEUES) {
            self.conn_count += 1;
            let conn = ConnId(self.conn_count);
            let node = usize::from(member.0);
            self.conns.insert(conn, Conn { engine, node, to_node: 0, to_engine: 0, closed: false });
            conns.push(conn);
            let hello =
                SessionHello { generation, instance, session: number, queue, queues: u16::from(QUEUES) };
            self.node_gets(conn, Packet::Hello(hello));
        }
        self.sessions.insert((engine, member), number);
        let hello =
            SessionHello { generation, instance, session: number, queue: 0, queues: u16::from(QUEUES) };
        self.handshakes.insert((engine, member, session), Handshake { conns, welcome: 0, hello });
        self.at(self.now + HANDSHAKE, Event::HandshakeOver(engine, member, session));
    }
}
