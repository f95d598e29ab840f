//! Which frontends this kernel can serve.

use anyhow::{Result, bail};

use crate::arguments::Frontend;

/// Refuses a frontend that this kernel lacks something for, naming it and what would work.
pub(super) fn check(frontend: Frontend) -> Result<()> {
    match frontend {
        Frontend::NbdServer | Frontend::IscsiTarget | Frontend::None => Ok(()),
        Frontend::Ublk => match ublk_frontend::missing() {
            None => Ok(()),
            Some(missing) => bail!(
                "frontend ublk needs {missing}, which this kernel does not have: load the module, or use --frontend {}",
                if fuse_frontend::missing().is_none() { "fuse" } else { "nbd-server" }
            ),
        },
        Frontend::Auto | Frontend::Fuse => match fuse_frontend::missing() {
            None => Ok(()),
            Some(missing) => bail!(
                "frontend {frontend} needs {missing}, which this kernel does not have: load the module, or use --frontend nbd-server"
            ),
        },
    }
}
