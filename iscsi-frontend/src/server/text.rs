//! Text in the full feature phase: SendTargets (RFC 7143, appendix C).

use lh_ring::Payload;

use super::Server;
use crate::connection::{Begun, TEXT_TAG, Text};
use crate::login::Kind;
use crate::pdu::{FINAL, IMMEDIATE, NO_TAG, Raw, TextRequest, flag, opcode, reject};
use crate::target::address_of;
use crate::text::{TEXT_MAX, pairs, push};

impl Server {
    /// A request, or a part of one: text that goes on has the tag of the first part, and ours behind it.
    pub(super) fn text(&mut self, slot: u16, raw: &Raw, request: &TextRequest, data: &Payload) {
        let Some(connection) = self.places.connection(slot) else { return };
        let (itt, immediate) = (request.itt.get(), request.opcode & IMMEDIATE != 0);
        let (goes_on, is_cut) = (request.flags & FINAL == 0, request.flags & flag::CONTINUE != 0);
        let begins = request.ttt.get() == NO_TAG;
        if begins {
            // What was begun before is given up (RFC 7143, 11.10.4).
            connection.text = Some(Begun { itt, rest: Vec::new(), agreed: connection.agreed });
        }
        let own = connection.text.as_mut().filter(|begun| begun.itt == itt);
        let own = own.filter(|_| begins || request.ttt.get() == TEXT_TAG);
        let Some(begun) = own.filter(|begun| begun.rest.len() + data.len() <= TEXT_MAX) else {
            connection.text = None;
            connection.session.answered(immediate);
            connection.reject(raw, reject::INVALID_FIELD);
            return;
        };
        begun.rest.extend_from_slice(&data.to_vec());
        if is_cut && goes_on {
            connection.text_response(opcode::TEXT_RESPONSE, itt, immediate, Text::GoesOn, &[]);
            return;
        }
        let (text, mut agreed) = (std::mem::take(&mut begun.rest), begun.agreed);
        if !goes_on {
            connection.text = None;
        }
        // Text that is cut off and final at once is neither.
        let Some(pairs) = pairs(&text).ok().filter(|_| !is_cut) else {
            connection.text = None;
            connection.session.answered(immediate);
            connection.reject(raw, reject::PROTOCOL_ERROR);
            return;
        };
        let address = address_of(&connection.fd);
        let discovery = connection.session.kind() == Kind::Discovery;
        let mut answer = Vec::new();
        for (key, value) in pairs {
            let name = &self.target.name;
            let asked = match value {
                "All" => discovery,
                "" => !discovery,
                value => value.eq_ignore_ascii_case(name),
            };
            match key {
                "SendTargets" if asked => {
                    push(&mut answer, "TargetName", name);
                    if let Some(address) = address {
                        push(&mut answer, "TargetAddress", &format!("{address},1"));
                    }
                }
                "SendTargets" | "InitiatorAlias" => {}
                // No offers, but answers to what was never asked (6.2).
                _ if matches!(value, "NotUnderstood" | "Irrelevant" | "Reject") => {}
                // Who somebody is, and what he can prove, is a matter of the login.
                "InitiatorName" | "TargetName" | "SessionType" | "AuthMethod" => {
                    push(&mut answer, key, "Reject");
                }
                _ if agreed.declare(key, value, &mut answer) => {}
                _ => push(&mut answer, key, "NotUnderstood"),
            }
        }
        if answer.len() > connection.agreed.send_segment as usize {
            // Nothing that belongs here is so long.
            connection.text = None;
            connection.session.answered(immediate);
            connection.reject(raw, reject::PROTOCOL_ERROR);
            return;
        }
        match &mut connection.text {
            Some(begun) => begun.agreed = agreed,
            // Both sides have said all: now it holds (6.4).
            None => connection.agreed = agreed,
        }
        let end = if goes_on { Text::GoesOn } else { Text::Ends };
        connection.text_response(opcode::TEXT_RESPONSE, itt, immediate, end, &answer);
    }
}
