//! A volume's stay on a node, and when it is over.
//!
//! A device outlives its engine, and what waits on it is carried out by the next one of the same stay. One whose engine was shut
//! out waits for ever: nobody can be rid of the processes and mounts that wait on it, and the node has to be restarted. The next
//! start of an engine there would take it away, as the first one of another stay; so that is done as soon as it is certain that the
//! next start would be that.

use crate::api::Engine;

/// True if a stay of a volume on this node is over: it has none of its engines, and will have none of that stay.
/// `engines`: all of the volume's, as they are now; `exists`: the volume is there.
pub fn is_over(node: &str, engines: &[Engine], exists: bool) -> bool {
    let owner = |engine: &Engine| engine.status.as_ref().map(|s| s.owner_id.clone()).unwrap_or_default();
    let is_here = |engine: &Engine| engine.spec.node_id == node || owner(engine) == node;
    // Whoever has an engine says so before anything is started for it. One that nobody has had may be a resource that was made anew.
    let is_elsewhere = |engine: &Engine| !owner(engine).is_empty();
    match engines {
        [] => !exists,
        engines => !engines.iter().any(is_here) && engines.iter().any(is_elsewhere),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{EngineSpec, EngineStatus};

    fn engine(node: &str, owner: &str) -> Engine {
        let mut engine = Engine::new("v-e-0", EngineSpec { node_id: node.into(), ..EngineSpec::default() });
        engine.status = Some(EngineStatus { owner_id: owner.into(), ..EngineStatus::default() });
        engine
    }

    #[test]
    fn a_stay_is_over_once_the_volume_is_had_elsewhere_or_gone() {
        // Each engine: where it is to be, and who has it.
        let cases = [
            ("n2/n2", true),
            ("n1/n1", false),
            // Detached: the next engine may be of the same stay.
            ("/n1", false),
            ("/n2", true),
            // On its way: nobody has it there yet, or it comes back.
            ("n2/n1", false),
            ("n1/n2", false),
            // Made anew, and nobody has had it since.
            ("/", false),
            // Migrating from here.
            ("n1/n1 n2/n2", false),
        ];
        for (engines, expected) in cases {
            let words = engines.split(' ').filter_map(|words| words.split_once('/'));
            let all: Vec<Engine> = words.map(|(node, owner)| engine(node, owner)).collect();
            assert_eq!(is_over("n1", &all, true), expected, "{engines}");
        }
        assert!(!is_over("n1", &[], true) && is_over("n1", &[], false));
    }
}
