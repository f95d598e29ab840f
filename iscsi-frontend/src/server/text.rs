//! Text in the full feature phase: SendTargets (RFC 7143, appendix C).

use lh_ring::Payload;

use super::Server;
use crate::login::Kind;
use crate::pdu::{IMMEDIATE, NO_TAG, Raw, TextRequest, flag, opcode, reject};
use crate::target::address_of;
use crate::text::{TEXT_MAX, pairs, push};

impl Server {
    pub(super) fn text(&mut self, slot: u16, raw: &Raw, request: &TextRequest, data: &Payload) {
        let Some(connection) = self.places.connection(slot) else { return };
        let (itt, immediate) = (request.itt.get(), request.opcode & IMMEDIATE != 0);
        let too_long = connection.text.len() + data.len() > TEXT_MAX;
        // No answer is ever so long that it goes on: no request has a tag of ours.
        if too_long || request.ttt.get() != NO_TAG {
            connection.text.clear();
            connection.session.answered(immediate);
            connection.reject(raw, reject::INVALID_FIELD);
            return;
        }
        connection.text.extend_from_slice(&data.to_vec());
        if request.flags & flag::CONTINUE != 0 {
            connection.text_response(opcode::TEXT_RESPONSE, itt, immediate, &[]);
            return;
        }
        let text = std::mem::take(&mut connection.text);
        let Ok(pairs) = pairs(&text) else {
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
                "SendTargets" => {}
                _ => push(&mut answer, key, "NotUnderstood"),
            }
        }
        answer.truncate(connection.agreed.send_segment as usize);
        connection.text_response(opcode::TEXT_RESPONSE, itt, immediate, &answer);
    }
}
