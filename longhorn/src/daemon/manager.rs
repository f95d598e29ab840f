//! `longhorn instance-manager`.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use control::front::Trust;
use control::host::Root;
use control::manager::Options;
use control::tls::TlsFiles;

use super::ManagerArgs;

pub(super) fn run(args: ManagerArgs) -> Result<()> {
    if args.own_session {
        nix::unistd::setsid().context("a session of its own")?;
    }
    let root = Root::at(&args.root).with_context(|| args.root.display().to_string())?;
    let program = std::env::current_exe().context("this program's own path")?;
    let listen =
        args.listen.map(|address| Ok::<_, anyhow::Error>((address, trust(&args, address)?))).transpose()?;
    let options = Options { root, program, listen, take_over: args.take_over };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = super::asked_to_end()?;
        Ok(control::manager::run(options, stop).await?)
    })
}

/// Who is obeyed on TCP. Nobody is by accident: what may start processes as root must be told whom it trusts.
fn trust(args: &ManagerArgs, address: SocketAddr) -> Result<Trust> {
    match (&args.tls_dir, args.insecure) {
        (_, true) => Ok(Trust::Everybody),
        (Some(directory), false) => Ok(Trust::Certificates(TlsFiles::below(directory))),
        (None, false) => match TlsFiles::in_longhorns_place() {
            Some(files) => Ok(Trust::Certificates(files)),
            None => bail!(
                "{address} would obey whoever reaches it: give --tls-dir DIR with ca.crt, tls.crt and tls.key, or \
                 --insecure if nobody else can reach it, or leave --listen out"
            ),
        },
    }
}
