//! `longhorn fuse-keeper`: the process that an engine starts to outlive it (`docs/formats/fuse.md`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fuse_frontend::{Attach, keeper};

use crate::arguments::volume_name;
use crate::device_names::{device_of, keeper_socket};

/// Arguments of a keeper.
#[derive(Debug, clap::Args)]
pub(super) struct KeeperArgs {
    /// Name of the volume
    #[arg(value_parser = volume_name)]
    volume: String,
    /// The root that the volume belongs to
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
}

pub(super) fn run(args: KeeperArgs) -> Result<()> {
    let options = keeper::Options {
        socket: keeper_socket(&args.volume),
        owner: owner(&args.root),
        node: device_of(&args.volume),
        volume: args.volume,
    };
    Ok(keeper::run(options)?)
}

fn owner(root: &Path) -> String {
    root.to_string_lossy().into_owned()
}

/// An engine's way to its keeper.
pub(super) fn attach_options(volume: &str, root: &Path) -> Result<Attach> {
    let program = std::env::current_exe().context("this program's own path")?;
    let words =
        [program.as_os_str(), "fuse-keeper".as_ref(), "--root".as_ref(), root.as_os_str(), volume.as_ref()];
    let command = words.into_iter().map(OsString::from).collect();
    Ok(Attach { socket: keeper_socket(volume), owner: owner(root), command, log: None })
}
