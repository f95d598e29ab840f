//! What is asked of the driver about a device, and how long that may take.

use std::io;
use std::time::{Duration, Instant};

use crate::abi::{DeviceInfo, Params, control_op};
use crate::kernel::Control;
use crate::nodes;

/// How long the kernel may take to notice the death of the server before: it closes its descriptors first, and on a busy
/// machine with O_DIRECT in flight that was seen to take 3 s.
pub(crate) const PREDECESSOR: Duration = Duration::from_secs(10);

/// How long a start, stop or removal may take: all of the queues' threads have a part in each.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks at a device whose state is about to change.
pub(crate) const LOOK: Duration = Duration::from_millis(5);

/// How long a device that is stopped may still be open by somebody who only looks at new devices (partition tables,
/// udev).
pub(crate) const GLANCE: Duration = Duration::from_secs(2);

/// What the kernel knows of a device.
pub(crate) fn info(control: &Control, device: u32) -> io::Result<DeviceInfo> {
    let mut info = DeviceInfo::default();
    control.exchange(control_op::GET_DEV_INFO, device, &mut info)?;
    Ok(info)
}

/// A device's sizes and numbers.
pub(crate) fn read_params(control: &Control, device: u32) -> io::Result<Params> {
    let len = u32::try_from(size_of::<Params>()).unwrap_or(0);
    let mut params = Params { len, ..Params::default() };
    control.exchange(control_op::GET_PARAMS, device, &mut params)?;
    Ok(params)
}

/// Removes a device without a disk. Who has it open, or its disk as long as that was there, keeps its number from others, and
/// nothing else.
pub(crate) fn delete(control: &Control, device: u32) -> io::Result<()> {
    let deleted = match control.order(control_op::DEL_DEV_ASYNC, device, 0, PATIENCE) {
        // Linux before 6.7, where the command waits until the number is free.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
            match control.order(control_op::DEL_DEV, device, 0, GLANCE) {
                Err(e) if e.kind() == io::ErrorKind::TimedOut && !nodes::devices()?.contains(&device) => {
                    Ok(())
                }
                other => other,
            }
        }
        other => other,
    };
    match deleted {
        Err(e) if e.raw_os_error() != Some(libc::ENODEV) => Err(e),
        _ => Ok(()),
    }
}

/// Waits until nobody has a deleted device open any more.
pub(crate) fn wait_free(control: &Control, device: u32, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    while info(control, device).is_ok() {
        if Instant::now() > deadline {
            let text = "somebody still holds it open".to_owned();
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
