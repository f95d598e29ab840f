//! Mechanisms that can be taken out, one by one, so that tests show that each is needed. Without the feature
//! `sabotage` there is nothing to switch.

/// What is taken out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sabotage {
    /// Members are forgotten before the epoch without them is durable.
    #[cfg(feature = "sabotage")]
    pub epoch_not_durable: bool,
    /// Ranges in doubt are not made equal.
    #[cfg(feature = "sabotage")]
    pub forget_in_doubt: bool,
    /// Marked chunks are not made equal.
    #[cfg(feature = "sabotage")]
    pub skip_intent: bool,
    /// Only the first queue hears that a member is out.
    #[cfg(feature = "sabotage")]
    pub leaver_on_one_queue: bool,
    /// A rebuild copies before every queue sends to the target.
    #[cfg(feature = "sabotage")]
    pub join_without_drain: bool,
    /// What a replica that comes back has too much itself is not looked at.
    #[cfg(feature = "sabotage")]
    pub forget_own_doubt: bool,
    /// Of a replica that comes back only the head is looked at, whatever snapshots were taken meanwhile.
    #[cfg(feature = "sabotage")]
    pub snapshot_meanwhile: bool,
    /// Snapshots are committed while writes are in flight.
    #[cfg(feature = "sabotage")]
    pub commit_without_pause: bool,
    /// Requests go on before every member has changed its head.
    #[cfg(feature = "sabotage")]
    pub resume_early: bool,
    /// A starting engine takes every prepared operation back, also those that a member has carried out, and goes on with
    /// whatever layers its members have then.
    #[cfg(feature = "sabotage")]
    pub undo_decided: bool,
    /// What is in doubt is copied layer by layer, whatever the members have folded.
    #[cfg(feature = "sabotage")]
    pub repair_by_layer: bool,
    /// Where that is why members are made equal through several layers, the source keeps what its layer itself holds.
    #[cfg(feature = "sabotage")]
    pub spare_source: bool,
    /// And a replica that is being filled does not get it.
    #[cfg(feature = "sabotage")]
    pub spare_filler: bool,
    /// Operations on the chain have the time that they were given, also if the one before has it.
    #[cfg(feature = "sabotage")]
    pub same_time_again: bool,
    /// Snapshots are folded while chunks in doubt are made equal.
    #[cfg(feature = "sabotage")]
    pub fold_beside_repair: bool,
    /// Among members whose processes died, any is the source, whether its host kept its power or not.
    #[cfg(feature = "sabotage")]
    pub power_unasked: bool,
    /// Flushes end well after a loss.
    #[cfg(feature = "sabotage")]
    pub loss_untold: bool,
    /// Who tells the same snapshots in another order holds others.
    #[cfg(feature = "sabotage")]
    pub order_counts: bool,
    /// Epochs do not say what their members had recorded.
    #[cfg(feature = "sabotage")]
    pub after_unnoted: bool,
    /// The second of a majority of two goes on without the first once it has learnt everything.
    #[cfg(feature = "sabotage")]
    pub learner_suffices: bool,
    /// Who is brought in sync goes on where all members died and came back.
    #[cfg(feature = "sabotage")]
    pub joiner_outlives_members: bool,
    /// No start asks the second of two that learns, nor waits for an engine before to end its reads there.
    #[cfg(feature = "sabotage")]
    pub learner_unheard: bool,
    /// Half of the replicas are a majority.
    #[cfg(feature = "sabotage")]
    pub half_suffices: bool,
    /// Replicas are closed cleanly though chunks are in doubt.
    #[cfg(feature = "sabotage")]
    pub close_in_doubt: bool,
    /// Marks are taken back, and replicas closed, in the round that they are in.
    #[cfg(feature = "sabotage")]
    pub rounds_unasked: bool,
    /// A round covers what was flushed after it was asked for.
    #[cfg(feature = "sabotage")]
    pub rounds_unpinned: bool,
    /// Of members whose hosts lost their power under this engine none lost it before another.
    #[cfg(feature = "sabotage")]
    pub losses_alike: bool,
    /// What members mark whose processes lived on is not in doubt, whoever else did not.
    #[cfg(feature = "sabotage")]
    pub others_marks_spared: bool,
}

/// Whether a mechanism is taken out; always false without the feature.
macro_rules! sabotaged {
    (in $config:expr, $switch:ident) => {{
        #[cfg(feature = "sabotage")]
        {
            $config.sabotage.$switch
        }
        #[cfg(not(feature = "sabotage"))]
        {
            false
        }
    }};
    ($conductor:expr, $switch:ident) => {
        sabotaged!(in $conductor.config, $switch)
    };
}
pub(super) use sabotaged;
