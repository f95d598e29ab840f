use super::*;

const A: &str = "iqn.2000-01.a:one,i,0x400000000001";
const B: &str = "iqn.2000-01.b:two,i,0x400000000002";
const C: &str = "iqn.2000-01.c:three,i,0x400000000003";

fn list(key: u64, new_key: u64, flags: u8) -> Vec<u8> {
    let mut list = vec![0; BASIC_LIST];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&new_key.to_be_bytes());
    list[20] = flags;
    list
}

fn cdb(action: u8, kind: u8) -> Cdb {
    let mut cdb = [0; 16];
    cdb[..3].copy_from_slice(&[0x5f, action, kind]);
    cdb[7] = 0xff;
    cdb
}

/// As the caller does it: on a copy.
fn act(
    r: &mut Reservations,
    port: &str,
    action: u8,
    kind: u8,
    key: u64,
    new: u64,
) -> Result<Effects, Refusal> {
    let mut next = r.clone();
    let effects = next.change(port, &cdb(action, kind), &list(key, new, 0))?;
    *r = next;
    Ok(effects)
}

/// A, B and C with keys 1, 2 and 3.
fn registered() -> Reservations {
    let mut r = Reservations::default();
    for (port, key) in [(A, 1), (B, 2), (C, 3)] {
        act(&mut r, port, out::REGISTER, 0, 0, key).unwrap();
    }
    assert_eq!(r.generation, 3);
    r
}

#[test]
fn a_registration_is_changed_only_by_who_knows_its_key() {
    let mut r = registered();
    assert_eq!(act(&mut r, A, out::REGISTER, 0, 7, 9), Err(Refusal::Conflict));
    assert_eq!(act(&mut r, A, out::REGISTER, 0, 0, 9), Err(Refusal::Conflict));
    act(&mut r, A, out::REGISTER, 0, 1, 9).unwrap();
    assert_eq!(r.key_of(A), Some(9));
    act(&mut r, A, out::REGISTER_AND_IGNORE, 0, 12345, 10).unwrap();
    assert_eq!(r.key_of(A), Some(10));
    act(&mut r, A, out::REGISTER, 0, 10, 0).unwrap();
    assert_eq!(r.key_of(A), None);
    // Whoever is not registered unregisters nothing, and changes nothing.
    let generation = r.generation;
    act(&mut r, A, out::REGISTER, 0, 0, 0).unwrap();
    assert_eq!(r.generation, generation);
    assert_eq!(act(&mut r, A, out::RESERVE, 1, 0, 0), Err(Refusal::Conflict));
}

/// Who may read and write beside a reservation of each kind that A holds: A, B (registered), somebody else.
#[test]
fn access_beside_every_kind() {
    let table = [
        (Kind::WriteExclusive, (true, true), (true, false), (true, false)),
        (Kind::ExclusiveAccess, (true, true), (false, false), (false, false)),
        (Kind::WriteExclusiveRegistrants, (true, true), (true, true), (true, false)),
        (Kind::ExclusiveAccessRegistrants, (true, true), (true, true), (false, false)),
        (Kind::WriteExclusiveAll, (true, true), (true, true), (true, false)),
        (Kind::ExclusiveAccessAll, (true, true), (true, true), (false, false)),
    ];
    for (kind, holder, member, stranger) in table {
        let mut r = registered();
        act(&mut r, A, out::RESERVE, kind as u8, 1, 0).unwrap();
        for (port, expected) in [(A, holder), (B, member), ("iqn.x,i,0x0", stranger)] {
            let found = (r.allows(port, Access::Reads), r.allows(port, Access::Changes));
            assert_eq!(found, expected, "{kind:?} {port}");
            assert!(r.allows(port, Access::Free));
        }
        assert_eq!(r.holds(B), kind.is_all(), "{kind:?}");
    }
}

#[test]
fn a_reservation_is_taken_once_and_released_by_its_holder() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 5, 1, 0).unwrap();
    act(&mut r, A, out::RESERVE, 5, 1, 0).unwrap();
    assert_eq!(act(&mut r, A, out::RESERVE, 6, 1, 0), Err(Refusal::Conflict));
    assert_eq!(act(&mut r, B, out::RESERVE, 5, 2, 0), Err(Refusal::Conflict));
    // Of another it releases nothing.
    act(&mut r, B, out::RELEASE, 5, 2, 0).unwrap();
    assert!(r.holds(A));
    assert_eq!(act(&mut r, A, out::RELEASE, 6, 1, 0), Err(INVALID_RELEASE.into()));
    let effects = act(&mut r, A, out::RELEASE, 5, 1, 0).unwrap();
    let told = vec![(B.to_owned(), RESERVATION_RELEASED), (C.to_owned(), RESERVATION_RELEASED)];
    assert_eq!(effects.attentions, told);
    assert_eq!(r.holder, None);
    assert_eq!(act(&mut r, A, out::RESERVE, 2, 1, 0), Err(INVALID_FIELD.at_cdb(2).into()));
    assert_eq!(act(&mut r, A, out::RESERVE, 0x11, 1, 0), Err(INVALID_FIELD.at_cdb(2).into()));
}

#[test]
fn the_last_of_all_registrants_releases() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 7, 1, 0).unwrap();
    act(&mut r, A, out::REGISTER, 0, 1, 0).unwrap();
    act(&mut r, B, out::REGISTER, 0, 2, 0).unwrap();
    assert!(r.holder.is_some());
    act(&mut r, C, out::REGISTER, 0, 3, 0).unwrap();
    assert_eq!((r.holder.is_none(), r.is_empty()), (true, true));
}

#[test]
fn preempting_takes_over_from_the_holder() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 1, 1, 0).unwrap();
    let effects = act(&mut r, B, out::PREEMPT_AND_ABORT, 5, 2, 1).unwrap();
    assert_eq!(effects.aborted, vec![A.to_owned()]);
    let told = vec![(A.to_owned(), REGISTRATION_PREEMPTED), (C.to_owned(), RESERVATION_RELEASED)];
    assert_eq!(effects.attentions, told);
    assert_eq!((r.key_of(A), r.holds(B)), (None, true));
    // A registration that holds nothing just falls.
    let effects = act(&mut r, B, out::PREEMPT, 5, 2, 3).unwrap();
    assert_eq!(effects.attentions, vec![(C.to_owned(), REGISTRATION_PREEMPTED)]);
    assert_eq!(r.registrations.len(), 1);
    assert_eq!(act(&mut r, B, out::PREEMPT, 5, 2, 77), Err(Refusal::Conflict));
    assert_eq!(act(&mut r, B, out::PREEMPT, 5, 2, 0), Err(INVALID_PARAMETER.at_parameter(8).into()));
}

/// SPC-4, 5.13.11.4.3 and 5.13.11.4.4: where nothing is taken over, all registrations of a key fall, also one's own.
#[test]
fn who_preempts_its_own_key_keeps_its_registration_only_with_the_reservation() {
    let mut r = registered();
    act(&mut r, C, out::REGISTER, 0, 3, 2).unwrap();
    act(&mut r, A, out::RESERVE, 1, 1, 0).unwrap();
    let effects = act(&mut r, B, out::PREEMPT_AND_ABORT, 1, 2, 2).unwrap();
    // Whoever does it knows, and is not ended.
    assert_eq!(effects.attentions, vec![(C.to_owned(), REGISTRATION_PREEMPTED)]);
    assert_eq!(effects.aborted, vec![C.to_owned()]);
    assert_eq!((r.key_of(B), r.key_of(C), r.holds(A)), (None, None, true));
    act(&mut r, A, out::PREEMPT, 3, 1, 1).unwrap();
    assert_eq!((r.key_of(A), r.holder.clone()), (Some(1), Some((Kind::ExclusiveAccess, A.to_owned()))));
    // All registrants are holders: none removes itself.
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 7, 1, 0).unwrap();
    act(&mut r, C, out::REGISTER, 0, 3, 2).unwrap();
    act(&mut r, B, out::PREEMPT, 7, 2, 2).unwrap();
    assert_eq!((r.key_of(B), r.key_of(C)), (Some(2), None));
}

#[test]
fn preempting_key_zero_falls_all_registrants() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 8, 1, 0).unwrap();
    act(&mut r, C, out::PREEMPT, 3, 3, 0).unwrap();
    assert_eq!((r.registrations.len(), r.holder.clone()), (1, Some((Kind::ExclusiveAccess, C.to_owned()))));
}

#[test]
fn clear_takes_everything_away() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 1, 1, 0).unwrap();
    let effects = act(&mut r, B, out::CLEAR, 0, 2, 0).unwrap();
    assert_eq!(effects.attentions.len(), 2);
    assert!(r.is_empty() && r.holder.is_none());
}

#[test]
fn a_reservation_moves_to_a_named_port() {
    let mut r = registered();
    act(&mut r, A, out::RESERVE, 1, 1, 0).unwrap();
    let mut id = Vec::new();
    push_transport_id(B, &mut id);
    let mut parameters = list(1, 22, 0);
    (parameters[17], parameters[19]) = (0x02, 1);
    parameters[20..24].copy_from_slice(&id[..4]);
    parameters.extend_from_slice(&id[4..]);
    // Not over another port of the target, of which there is one, nor to oneself.
    let mut elsewhere = parameters.clone();
    elsewhere[19] = 2;
    let mut own = Vec::new();
    push_transport_id(A, &mut own);
    let to_itself = [&parameters[..20], &own].concat();
    for (bad, at) in [(elsewhere, 18), (to_itself, 24)] {
        let refused = r.clone().change(A, &cdb(out::REGISTER_AND_MOVE, 0), &bad);
        assert_eq!(refused, Err(INVALID_PARAMETER.at_parameter(at).into()));
    }
    let done = r.change(A, &cdb(out::REGISTER_AND_MOVE, 0), &parameters);
    assert_eq!(done, Ok(Effects::default()));
    assert_eq!((r.holds(B), r.key_of(B), r.key_of(A)), (true, Some(22), None));
    // In capitals it is the same port.
    let port = "iqn.2000-01.c:three,i,0x00023dabcdef";
    act(&mut r, port, out::REGISTER, 0, 0, 4).unwrap();
    let mut id = Vec::new();
    push_transport_id(&port.replace("dabcdef", "DABCDEF"), &mut id);
    let mut parameters = [&list(22, 4, 0)[..20], &id].concat();
    parameters[19] = 1;
    r.change(B, &cdb(out::REGISTER_AND_MOVE, 0), &parameters).unwrap();
    assert!(r.holds(port) && !r.holds(B), "{:?}", r.holder);
    parameters[..8].copy_from_slice(&4_u64.to_be_bytes());
    // An ISID has six bytes.
    for wrong in ["iqn.a,i,0x00023d", "iqn.a,i,0x00023d00000g", "iqn.a,i,0x00023d0000001"] {
        let mut id = Vec::new();
        push_transport_id(wrong, &mut id);
        let wrong = [&parameters[..20], &id].concat();
        let refused = r.clone().change(port, &cdb(out::REGISTER_AND_MOVE, 0), &wrong);
        assert_eq!(refused, Err(INVALID_PARAMETER.at_parameter(24).into()));
    }
    // A no longer is anybody.
    let again = r.clone().change(A, &cdb(out::REGISTER_AND_MOVE, 0), &parameters);
    assert_eq!(again, Err(Refusal::Conflict));
    assert_eq!(port_of(&[0x45, 0, 0, 4, b'a', b'b', b'c', b'd']), None);
}

#[test]
fn lists_of_another_length_and_options_not_offered_are_refused() {
    let mut r = registered();
    let short = r.change(A, &cdb(out::REGISTER, 0), &list(1, 2, 0)[..20]);
    assert_eq!(short, Err(PARAMETER_LIST_LENGTH.into()));
    for flags in [0x04, 0x08] {
        let refused = r.change(A, &cdb(out::REGISTER, 0), &list(1, 2, flags));
        assert_eq!(refused, Err(INVALID_PARAMETER.at_parameter(20).into()));
    }
}

#[test]
fn registrations_are_bounded() {
    let mut r = Reservations::default();
    for i in 0..REGISTRATIONS_MAX {
        act(&mut r, &format!("iqn.x:{i},i,0x1"), out::REGISTER, 0, 0, 1).unwrap();
    }
    assert_eq!(act(&mut r, A, out::REGISTER, 0, 0, 1), Err(NO_REGISTRATIONS.into()));
}

#[test]
fn reports_are_complete_and_cut_to_the_allocation_length() {
    let mut r = registered();
    act(&mut r, B, out::RESERVE, 6, 2, 0).unwrap();
    let ask = |action: u8, length: u16| {
        let mut asked = cdb(action, 0);
        asked[7..9].copy_from_slice(&length.to_be_bytes());
        let mut reply = Vec::new();
        r.report(&asked, true, &mut reply);
        reply
    };
    let keys = ask(0, 255);
    assert_eq!(keys[..8], [0, 0, 0, 3, 0, 0, 0, 24]);
    assert_eq!(keys[8..], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(ask(0, 9).len(), 9);
    let reservation = ask(1, 255);
    assert_eq!(reservation[4..], [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 6, 0, 0]);
    assert_eq!(ask(2, 255), [0, 8, 1, 0x80, 0xea, 1, 0, 0]);
    let full = ask(3, 1000);
    assert_eq!(be32(&full, 4) as usize, full.len() - 8);
    let (holder, name) = (8 + 24 + be32(&full, 28) as usize, B.as_bytes());
    assert_eq!((full[20], full[holder + 12], full[holder + 13]), (0, 1, 6));
    assert_eq!(&full[holder + 28..holder + 28 + name.len()], name);
}
