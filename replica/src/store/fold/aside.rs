//! A fold stands aside for layer images.
//!
//! A fold looks at a snapshot once, and then takes what it has seen for what is there: of a layer that only the fold writes
//! that is so. A layer image ([`Store::plan_put`]) that goes into one of its two layers beside it is lost: behind the place where
//! the fold is, if the layer's file goes; before it, if what is moved was looked for already. And what was copied into the parent
//! lies over what an image of the parent has brought.
//!
//! So the fold gives way ([`Fold::give_way`]): it comes to where nothing of it is on its way ([`super::Step::GiveWay`]), what it has
//! noted is taken back ([`super::super::Directory::forget_fold`]) before the first byte of the image is written, and when the
//! images have ended it begins anew. Into the head images go as clients' writes do, under its claims.

use std::io;
use std::sync::atomic::Ordering;

use super::super::data::Store;
use super::super::layer::LayerNo;
use super::FoldPlan;
use super::running::Fold;
use super::stage::Stage;

impl Fold {
    /// An image of this layer has to wait until the fold stands aside.
    pub fn touches(&self, store: &Store, layer: LayerNo) -> bool {
        layer != store.head() && (layer == self.parent || layer == self.child)
    }

    /// It stands aside at the next step at which it can, or ends before. Work that runs is cut short.
    pub fn give_way(&mut self) {
        if !self.is_ended() {
            self.cancel.store(true, Ordering::Relaxed);
            self.gives_way = true;
        }
    }

    /// It is to end, or to stand aside: nothing is worth being waited for.
    pub fn is_broken_off(&self) -> bool {
        self.gives_way || self.error.is_some()
    }

    /// [`super::Step::GiveWay`] has come: nothing of it is on its way, until [`Fold::begin_anew`].
    pub fn stands_aside(&self) -> bool {
        self.stage == Stage::Aside
    }

    /// No image of its layers is on its way any more, and nothing is noted of the fold.
    pub fn begin_anew(&mut self, store: &mut Store) {
        if self.error.is_some() {
            return;
        }
        // The head of the beginning may be a snapshot now.
        let name = store.at(self.child).name.clone().unwrap_or_default();
        let child = self.plan.child.is_some().then_some(name);
        match Self::new(store, FoldPlan { child, resume: None, ..self.plan.clone() }) {
            Some(mut anew) => {
                anew.moved = self.moved;
                *self = anew;
            }
            None => self.fail("the snapshot is gone".into()),
        }
    }

    /// What is half done is in the file and nowhere else: the store looks at what is there.
    pub(super) fn set_back(&mut self, store: &mut Store, end: Stage) -> io::Result<()> {
        let target = self.target();
        for extent in self.moving.drain(..).chain(self.marking.drain(..)) {
            store.refresh(target, extent)?;
        }
        self.stage = self.stage.broken_off(end);
        Ok(())
    }

    /// It ends for this reason, at the next step at which it can.
    pub(super) fn broken_off(&mut self, why: &str, store: &mut Store) -> io::Result<()> {
        self.error.get_or_insert_with(|| why.to_owned());
        self.set_back(store, Stage::Ended)
    }
}
