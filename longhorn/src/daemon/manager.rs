//! `longhorn instance-manager`.

use anyhow::{Context, Result};
use control::host::Root;
use control::manager::Options;

use super::ManagerArgs;

pub(super) fn run(args: ManagerArgs) -> Result<()> {
    if args.own_session {
        nix::unistd::setsid().context("a session of its own")?;
    }
    let root = Root::at(&args.root).with_context(|| args.root.display().to_string())?;
    let program = std::env::current_exe().context("this program's own path")?;
    let options = Options { root, program, listen: args.listen, insecure: args.insecure };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = super::asked_to_end()?;
        Ok(control::manager::run(options, stop).await?)
    })
}
