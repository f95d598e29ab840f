//! Who is asked for its state, and the names of layers.

use super::ask::ControlFor;
use super::{Conductor, Output};
use crate::message::{LayerRef, MemberId};

impl Conductor {
    pub(super) fn ask_state(&mut self, member: MemberId) {
        self.replicas.get_mut(member).state = None;
        self.desk.ask(member, ControlFor::State, lh_wire::Control::State);
    }

    /// The number of a layer's name; `None` is the head.
    pub(super) fn layer_ref(&mut self, name: &str) -> Option<LayerRef> {
        if name.is_empty() {
            return None;
        }
        let (number, is_new) = self.chain.volume.number_of(name);
        if is_new {
            self.desk.emit(Output::NameLayer(number, name.to_owned()));
        }
        Some(number)
    }

    /// Nobody copies or compares layers: no number stands for any. A volume has a few hundred, but in the life of an engine any number
    /// of snapshots come and go.
    pub(super) fn forget_layer_refs(&mut self) {
        if self.chain.volume.forget_numbers() {
            self.desk.emit(Output::ForgetLayers);
        }
    }
}
