//! An engine's way to its device: the one that the last engine left behind, or a new one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Geometry, SECTOR};
use lh_ring::sys::is_shortage;

use crate::abi::{
    ANY_DEVICE, BasicParams, DEPTH_MAX, DeviceInfo, DeviceState, DiscardParams, Params, attribute,
    control_op, feature, param_type,
};
use crate::channel::Channel;
use crate::driver::{GLANCE, LOOK, PATIENCE, PREDECESSOR, delete, info, read_params, wait_free};
use crate::error::{AttachError, DeviceError, refused, unreachable};
use crate::identity::mark;
use crate::kernel::Control;
use crate::left_behind::find;
use crate::nodes;

/// What all devices here have, or are not made: to outlive their server, and bytes that the kernel copies where we say.
const NEEDED: u64 =
    feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE | feature::CMD_IOCTL_ENCODE | feature::USER_COPY;

/// What an older driver lacks of it.
const LACKING: &str = "user copy and recovery of ublk devices (Linux 6.5)";

/// What is used where the kernel has it.
const WANTED: u64 = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;

/// Longest discard and write of zeroes: below 4 GiB, of whole blocks. The kernel cuts longer ones in pieces.
const ZERO_SECTORS: u32 = (u32::MAX >> 9) & !7;

/// Which device an engine wants.
#[derive(Clone, Debug)]
pub struct Attach {
    /// The root whose volume it is: volumes of one name under two roots have two devices.
    pub owner: String,
    /// The volume's name.
    pub volume: String,
    /// Queues of a new device. The kernel makes no more than the machine has processors.
    pub queues: u16,
    /// Requests of each queue at a time: not more than the volume's queues take.
    pub depth: u16,
    /// The volume's sizes.
    pub geometry: Geometry,
}

/// How far a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Made by us, not shown yet.
    New,
    /// Left behind by an engine before: its requests wait for us.
    LeftBehind,
    /// Shown.
    Running,
    /// Told to go, without an answer yet.
    Going,
}

impl Phase {
    /// What a device is that has been told to go, by what came of that. One that is refused is there as before, also where it was taken
    /// to be on its way: the kernel looks for who has it open when it comes to the command, which may be after its time.
    const fn after(self, stopped: &Result<(), DeviceError>) -> Self {
        match stopped {
            Ok(()) => Self::New,
            Err(DeviceError::Unanswered(_)) => Self::Going,
            Err(DeviceError::InUse(_)) => Self::Running,
            Err(DeviceError::FixedSize | DeviceError::Kernel { .. }) => self,
        }
    }
}

/// A device that this process has for itself.
#[derive(Debug)]
pub struct Attached {
    control: Control,
    info: DeviceInfo,
    /// `/dev/ublkcN`; `None` once it is to go away.
    channel: Option<File>,
    phase: Phase,
    size: u64,
}

/// What the kernel lacks for this frontend, in words that name it; `None` if nothing, or if that cannot be told just now, of which
/// [`attach()`] says why.
pub fn missing() -> Option<String> {
    match reach() {
        Err(AttachError::Missing(missing)) => Some(missing),
        _ => None,
    }
}

/// Why a volume should rather be shown by something else while it has the choice, although ublk works here: drivers before Linux
/// 6.16 (`docs/decisions/0015-ublk-by-choice-before-linux-6-16.md`). False, too, where there is no driver.
pub fn is_fragile() -> bool {
    Control::open()
        .is_ok_and(|control| features(&control).map_or(true, |known| known & feature::UPDATE_SIZE == 0))
}

/// What the driver can do.
fn features(control: &Control) -> io::Result<u64> {
    let mut features = 0_u64;
    let answer = control.exchange(control_op::GET_FEATURES, ANY_DEVICE, &mut features);
    told(answer.map(|()| features))
}

/// A kernel that does not know the question can do nothing of it. One that could not be asked has said nothing.
fn told(answer: io::Result<u64>) -> io::Result<u64> {
    match answer {
        Err(e) if !is_shortage(&e) => Ok(0),
        answer => answer,
    }
}

/// The way to a driver that can do what is needed.
fn reach() -> Result<Control, AttachError> {
    let control = Control::open().map_err(unreachable)?;
    let known = features(&control).map_err(refused("the ublk driver is not asked what it can do"))?;
    if known & NEEDED == NEEDED { Ok(control) } else { Err(AttachError::Missing(LACKING.to_owned())) }
}

/// Finds or makes the volume's device. Nothing is served before the queues' threads have made [`crate::Server`]s of
/// [`Attached::channels`] and [`Attached::start`] has been called.
///
/// The caller knows that the volume has no other live engine on this machine.
///
/// # Errors
/// [`AttachError`].
pub fn attach(options: &Attach) -> Result<Attached, AttachError> {
    let control = reach()?;
    match find(&control, mark(&options.owner, &options.volume))? {
        Some(info) => take_over(control, info, options),
        None => make(control, options),
    }
}

fn make(control: Control, options: &Attach) -> Result<Attached, AttachError> {
    let max_transfer = options.geometry.max_transfer;
    let mut info = DeviceInfo {
        nr_hw_queues: options.queues.max(1),
        queue_depth: options.depth.clamp(1, DEPTH_MAX),
        max_io_buf_bytes: max_transfer,
        dev_id: ANY_DEVICE,
        ublksrv_pid: -1,
        flags: NEEDED | WANTED,
        ublksrv_flags: mark(&options.owner, &options.volume),
        ..DeviceInfo::default()
    };
    control
        .exchange(control_op::ADD_DEV, ANY_DEVICE, &mut info)
        .map_err(refused("the kernel makes no ublk device"))?;
    let device = info.dev_id;
    let prepared = prepare(&control, &info, &options.geometry);
    match prepared {
        Ok(channel) => Ok(Attached {
            control,
            info,
            channel: Some(channel),
            phase: Phase::New,
            size: options.geometry.size,
        }),
        Err(e) => {
            if let Err(left) = delete(&control, device) {
                tracing::warn!("ublk device {device} stays behind: {left}");
            }
            Err(e)
        }
    }
}

/// Gives a new device its sizes, and opens it.
fn prepare(control: &Control, info: &DeviceInfo, geometry: &Geometry) -> Result<File, AttachError> {
    let device = info.dev_id;
    if info.flags & NEEDED != NEEDED {
        return Err(AttachError::Missing(LACKING.to_owned()));
    }
    let mut params = params(geometry);
    control
        .exchange(control_op::SET_PARAMS, device, &mut params)
        .map_err(refused(format!("ublk device {device} does not take the volume's sizes")))?;
    open(control, device)
}

fn open(control: &Control, device: u32) -> Result<File, AttachError> {
    let numbers = read_params(control, device)
        .map_err(refused(format!("ublk device {device} does not tell its numbers")))?
        .numbers;
    nodes::open(device, numbers.char_major, numbers.char_minor, Instant::now() + PREDECESSOR)
        .map_err(refused(format!("/dev/ublkc{device}")))
}

fn params(geometry: &Geometry) -> Params {
    let shift = |bytes: u32| u8::try_from(bytes.max(1).ilog2()).unwrap_or(0);
    Params {
        len: u32::try_from(size_of::<Params>()).unwrap_or(0),
        types: param_type::BASIC | param_type::DISCARD,
        basic: BasicParams {
            attrs: attribute::VOLATILE_CACHE | attribute::FUA,
            logical_bs_shift: shift(geometry.logical_block),
            physical_bs_shift: shift(geometry.physical_block),
            io_opt_shift: shift(geometry.physical_block),
            io_min_shift: shift(geometry.physical_block),
            max_sectors: geometry.max_transfer >> 9,
            dev_sectors: geometry.size / SECTOR,
            ..BasicParams::default()
        },
        discard: DiscardParams {
            discard_granularity: u32::try_from(BLOCK).unwrap_or(4096),
            max_discard_sectors: ZERO_SECTORS,
            max_write_zeroes_sectors: ZERO_SECTORS,
            max_discard_segments: 1,
            ..DiscardParams::default()
        },
        ..Params::default()
    }
}

fn take_over(control: Control, info: DeviceInfo, options: &Attach) -> Result<Attached, AttachError> {
    let device = info.dev_id;
    let failed = |what: &str| refused(format!("/dev/ublkb{device} is not taken over: {what}"));
    if info.flags & NEEDED != NEEDED {
        let reason = io::Error::from(io::ErrorKind::Unsupported);
        return Err(failed("it was made without user copy")(reason));
    }
    let params = read_params(&control, device).map_err(failed("its sizes"))?;
    let (theirs, ours) = (1 << params.basic.logical_bs_shift, options.geometry.logical_block);
    if theirs != ours {
        return Err(AttachError::Blocks { device, theirs, ours });
    }
    let deadline = Instant::now() + PREDECESSOR;
    while let Err(e) = control.order(control_op::START_USER_RECOVERY, device, 0, PATIENCE) {
        if e.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
            return Err(failed("its state")(e));
        }
        std::thread::sleep(LOOK);
    }
    let channel = open(&control, device)?;
    let size = options.geometry.size;
    Ok(Attached { control, info, channel: Some(channel), phase: Phase::LeftBehind, size })
}

impl Attached {
    /// True if an engine before has left the device behind, with whatever uses it.
    pub const fn is_taken_over(&self) -> bool {
        matches!(self.phase, Phase::LeftBehind)
    }

    /// How many queues the device has: as many as it was made with.
    pub const fn queues(&self) -> u16 {
        self.info.nr_hw_queues
    }

    /// `/dev/ublkbN`, which exists while the device is shown.
    pub fn device(&self) -> PathBuf {
        format!("/dev/ublkb{}", self.info.dev_id).into()
    }

    /// The device's queues, dealt to so many threads, each of which makes one [`crate::Server`] of what it gets. A thread
    /// gets several where the engine before had more threads, and none where it had fewer.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn channels(&self, threads: usize) -> io::Result<Vec<Vec<Channel>>> {
        let file = self.channel.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let mut dealt: Vec<Vec<Channel>> = (0..threads.max(1)).map(|_| Vec::new()).collect();
        for queue in 0..self.info.nr_hw_queues {
            let fd = OwnedFd::from(file.try_clone()?);
            let thread = usize::from(queue) % dealt.len();
            dealt[thread].push(Channel { fd, queue, depth: self.info.queue_depth });
        }
        Ok(dealt)
    }

    /// Shows the device, or lets those who wait for it go on, once every queue is served; it waits for that.
    ///
    /// # Errors
    /// [`AttachError::Kernel`]: `TimedOut` if a queue is not served.
    pub fn start(&mut self) -> Result<(), AttachError> {
        let device = self.info.dev_id;
        let pid = std::process::id().into();
        let op = match self.phase {
            Phase::New => control_op::START_DEV,
            Phase::LeftBehind => control_op::END_USER_RECOVERY,
            Phase::Running | Phase::Going => return Ok(()),
        };
        self.control
            .order(op, device, pid, PATIENCE)
            .map_err(refused(format!("/dev/ublkb{device} does not start")))?;
        let before = std::mem::replace(&mut self.phase, Phase::Running);
        if let Err(e) = self.keep_a_command_back() {
            tracing::warn!(
                "{}: {e}: if this process dies under load, no other can take it over",
                self.device().display()
            );
        }
        if before == Phase::LeftBehind {
            self.adopt_size()?;
        }
        Ok(())
    }

    /// Sees to it that the driver has a command of each queue left whatever is asked of the device, where it needs one. It
    /// learns of this server's death by commands that are cancelled, and before Linux 6.16 by nothing else: of a server that had
    /// all of them in its hands it would never learn, and no other could take the device over.
    ///
    /// What is set is the limit of the kernel's queue, which whoever chooses another scheduler sets anew: to be called again
    /// and again while the device is shown.
    ///
    /// # Errors
    /// The system's, as where /sys cannot be written.
    pub fn keep_a_command_back(&self) -> io::Result<()> {
        let learns_otherwise = self.info.flags & feature::UPDATE_SIZE != 0;
        if self.phase != Phase::Running || learns_otherwise {
            return Ok(());
        }
        nodes::limit_requests(self.info.dev_id, self.info.queue_depth.saturating_sub(1).max(1))
    }

    /// The volume may have grown while nobody served it.
    fn adopt_size(&mut self) -> Result<(), AttachError> {
        let device = self.info.dev_id;
        let params = read_params(&self.control, device)
            .map_err(refused(format!("/dev/ublkb{device} does not tell its size")))?;
        if params.basic.dev_sectors * SECTOR == self.size {
            return Ok(());
        }
        match self.resize(self.size) {
            Ok(()) => {}
            Err(DeviceError::Kernel { what, source }) => return Err(AttachError::Kernel { what, source }),
            Err(e) => tracing::warn!("{e}"),
        }
        Ok(())
    }

    /// Major and minor number of the shown device, for nodes of other names.
    ///
    /// # Errors
    /// The system's.
    pub fn numbers(&self) -> io::Result<(u32, u32)> {
        let numbers = read_params(&self.control, self.info.dev_id)?.numbers;
        Ok((numbers.disk_major, numbers.disk_minor))
    }

    /// Takes the volume's new size, which the queues' devices tell already, over to the device, mounted or not.
    ///
    /// # Errors
    /// [`DeviceError::FixedSize`] before Linux 6.16.
    pub fn resize(&mut self, size: u64) -> Result<(), DeviceError> {
        self.size = size;
        if self.phase != Phase::Running {
            return Ok(());
        }
        if self.info.flags & feature::UPDATE_SIZE == 0 {
            return Err(DeviceError::FixedSize);
        }
        self.control
            .order(control_op::UPDATE_SIZE, self.info.dev_id, size / SECTOR, PATIENCE)
            .map_err(self.kernel("does not take the new size"))
    }

    fn kernel(&self, what: &str) -> impl FnOnce(io::Error) -> DeviceError + use<> {
        let what = format!("{} {what}", self.device().display());
        move |source| DeviceError::Kernel { what, source }
    }

    /// Takes the device away from its users, who have none of it in use, while the queues still serve: their last
    /// requests are answered, for which they have `patience`, and their [`crate::Server`]s see the end. To be followed by
    /// [`Attached::remove`] once they have. Before Linux 7.0 the caller has made sure that nobody merely has it open.
    ///
    /// # Errors
    /// [`DeviceError::InUse`]: nothing has changed. [`DeviceError::Unanswered`]: it goes on, and is to be asked for again: the kernel may
    /// come to refuse it.
    pub fn stop(&mut self, patience: Duration) -> Result<(), DeviceError> {
        let stopped = match self.phase {
            Phase::Running => self.stop_disk(patience),
            Phase::Going if self.may_refuse() => self.stop_disk(patience),
            // The driver refuses nothing that it has begun with.
            Phase::Going => Err(DeviceError::Unanswered(self.device())),
            Phase::New | Phase::LeftBehind => Ok(()),
        };
        self.phase = self.phase.after(&stopped);
        if matches!(self.phase, Phase::New | Phase::Going) {
            self.channel = None;
        }
        stopped
    }

    /// The driver itself refuses to stop what somebody has open (Linux 7.0).
    const fn may_refuse(&self) -> bool {
        self.info.flags & feature::SAFE_STOP_DEV != 0
    }

    fn stop_disk(&self, patience: Duration) -> Result<(), DeviceError> {
        let began = Instant::now();
        loop {
            let refusal = match self.try_stop(patience.saturating_sub(began.elapsed())) {
                Ok(()) => return Ok(()),
                Err(e) => e,
            };
            match refusal.raw_os_error() {
                Some(libc::EBUSY) if began.elapsed() < GLANCE => std::thread::sleep(LOOK),
                Some(libc::EBUSY) => return Err(DeviceError::InUse(self.device())),
                _ if refusal.kind() == io::ErrorKind::TimedOut => {
                    return Err(DeviceError::Unanswered(self.device()));
                }
                // By somebody else.
                _ if self.is_stopped() => return Ok(()),
                _ => return Err(self.kernel("is not stopped")(refusal)),
            }
        }
    }

    /// True while it is shown, for all that is known: somebody else may have stopped it.
    pub fn is_shown(&self) -> bool {
        self.phase == Phase::Running && !self.is_stopped()
    }

    fn is_stopped(&self) -> bool {
        match info(&self.control, self.info.dev_id) {
            Ok(info) => DeviceState::of(&info) == Some(DeviceState::Dead),
            Err(e) => e.raw_os_error() == Some(libc::ENODEV),
        }
    }

    fn try_stop(&self, patience: Duration) -> io::Result<()> {
        let device = self.info.dev_id;
        if self.may_refuse() {
            return self.control.order(control_op::TRY_STOP_DEV, device, 0, patience);
        }
        // Mounts and partitions hold the device exclusively; a program that merely has it open gets errors from now on.
        let (major, minor) = self.numbers()?;
        let held = nodes::open_exclusively(device, major, minor)?;
        let stopped = self.control.order(control_op::STOP_DEV, device, 0, patience);
        drop(held);
        stopped
    }

    /// Removes a stopped device for good, once the queues' threads have let go of it.
    ///
    /// # Errors
    /// The system's; `TimedOut` while somebody holds `/dev/ublkcN` for longer than `patience`.
    pub fn remove(self, patience: Duration) -> io::Result<()> {
        drop(self.channel);
        delete(&self.control, self.info.dev_id)?;
        wait_free(&self.control, self.info.dev_id, patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_cannot_be_asked_has_not_said_that_it_lacks_anything() {
        let told = |errno| told(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::ENOMEM, libc::EMFILE, libc::ENFILE] {
            assert_eq!(told(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        // ENOTSUPP, which is the kernel's own.
        for errno in [libc::EOPNOTSUPP, 524, libc::EINVAL, libc::ENODEV, libc::ENOSYS, libc::EPERM] {
            assert_eq!(told(errno).unwrap(), 0);
        }
    }

    /// Whoever is refused after his time has a device that is there, and would wait for its end for ever.
    #[test]
    fn a_device_that_was_to_go_and_is_refused_is_there_as_before() {
        let device = || PathBuf::from("/dev/ublkb0");
        let failed = || DeviceError::Kernel { what: "it".into(), source: io::ErrorKind::OutOfMemory.into() };
        for before in [Phase::Running, Phase::Going] {
            assert_eq!(before.after(&Err(DeviceError::Unanswered(device()))), Phase::Going);
            assert_eq!(before.after(&Err(DeviceError::InUse(device()))), Phase::Running);
            assert_eq!(before.after(&Err(failed())), before);
            assert_eq!(before.after(&Ok(())), Phase::New);
        }
    }

    #[test]
    fn a_device_tells_the_volumes_sizes() {
        let geometry = Geometry {
            size: 10 << 30,
            logical_block: 512,
            physical_block: 4096,
            max_transfer: 1 << 20,
            depth: 128,
        };
        let params = params(&geometry);
        assert_eq!(params.len, 80);
        assert_eq!((params.basic.logical_bs_shift, params.basic.physical_bs_shift), (9, 12));
        assert_eq!((params.basic.max_sectors, params.basic.dev_sectors), (2048, 20 << 20));
        assert_eq!(params.basic.attrs, 12, "a write cache, and FUA");
        assert_eq!(params.discard.discard_granularity, 4096);
        assert_eq!(params.discard.max_discard_sectors % 8, 0);
        let large = super::params(&Geometry { logical_block: 4096, ..geometry });
        assert_eq!(large.basic.logical_bs_shift, 12);
    }
}
