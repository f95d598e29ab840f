//! Engines whose answers do not come through, with real processes: what was done is not undone, and is named.

mod host;
mod stopped;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use host::{Host, is_healthy, kill_9, pid, signal, until};
use nix::sys::signal::Signal;
use serde_json::Value;
use stopped::stand_still;

const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

/// Stands between commands and an engine's control socket as long as it lives.
struct Between {
    socket: PathBuf,
    away: PathBuf,
}

impl Between {
    /// `carry` is given each connection on which somebody says something: its number, the connection, and one to the engine.
    fn of(host: &Host, carry: impl Fn(usize, UnixStream, UnixStream) + Send + Sync + 'static) -> Self {
        let socket = host.path(&format!("run/{}-e-0.grpc.sock", host.volume));
        let away = socket.with_extension("away");
        fs::rename(&socket, &away).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let (carry, count, engine) = (Arc::new(carry), Arc::new(AtomicUsize::new(0)), away.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(engine) = UnixStream::connect(&engine) else { return };
                let (carry, count) = (Arc::clone(&carry), Arc::clone(&count));
                std::thread::spawn(move || {
                    // Whoever only looks whether somebody listens says nothing.
                    let mut first = [0; 1024];
                    let length = (&client).read(&mut first).unwrap_or(0);
                    if length > 0 {
                        (&engine).write_all(&first[..length]).unwrap();
                        carry(count.fetch_add(1, Ordering::SeqCst), client, engine);
                    }
                });
            }
        });
        Self { socket, away }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        let _ = fs::rename(&self.away, &self.socket);
    }
}

/// Takes over what one says to the other, until he is through.
fn take_over(from: &UnixStream, to: &UnixStream) -> std::thread::JoinHandle<()> {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
    })
}

fn up(host: &Host) -> Value {
    host.up("none", &["--replicas", "1"]);
    host.wait("healthy", is_healthy)
}

/// The replicas that the engine says it has.
fn replicas_of(engine: &Path) -> usize {
    let url = format!("unix:{}", engine.display());
    let done = Command::new(LONGHORN).args(["--url", &url, "ls"]).stdin(Stdio::null()).output().unwrap();
    String::from_utf8(done.stdout).unwrap().lines().filter(|line| line.contains("-r-")).count()
}

/// It may be a member by then, and hold what was written since.
#[test]
fn a_replica_of_which_is_not_heard_whether_it_was_taken_in_is_not_deleted() {
    let Some(host) = Host::new("unheard") else { return };
    let volume = host.volume.as_str();
    up(&host);
    let away = host.path(&format!("run/{volume}-e-0.grpc.away"));
    let between = Between::of(&host, move |_, client, engine| {
        let said = take_over(&client, &engine);
        until("the engine has it", || replicas_of(&away) == 2);
        let _ = client.shutdown(Shutdown::Both);
        said.join().unwrap();
    });
    host.refused(&["replica", "add", volume], "says whether volume");
    drop(between);
    let status = host.wait("two replicas", |s| is_healthy(s) && s["replicas"].as_array().unwrap().len() == 2);
    let name = status["replicas"][1]["name"].as_str().unwrap();
    // As it was told.
    host.ok(&["replica", "rm", volume, name]);
    host.ok(&["down", volume]);
}

/// What it had not flushed is in its replicas' hosts' memory alone.
#[test]
fn a_volume_whose_engine_dies_as_it_flushes_is_not_said_to_be_flushed() {
    let Some(host) = Host::new("unflushed") else { return };
    let volume = host.volume.as_str();
    let status = up(&host);
    let [engine, replica] = [&status["engine_pid"], &status["replicas"][0]["pid"]].map(pid);
    stand_still(replica);
    let down = host.command(&["down", volume]).stderr(Stdio::piped()).spawn().unwrap();
    host.wait("it flushes", |s| s["state"] == "detaching");
    kill_9(engine);
    signal(replica, Signal::SIGCONT);
    let done = down.wait_with_output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("is down, but not flushed"), "{said}");
    assert_eq!(host.status()["state"], "detached");
    host.ok(&["up", volume]);
    host.ok(&["down", volume]);
}

/// Nobody else knows a name that was made up.
#[test]
fn a_snapshot_is_named_also_where_nobody_tells_more_of_it() {
    let Some(host) = Host::new("nameless") else { return };
    let volume = host.volume.as_str();
    let replica = up(&host)["replicas"][0]["name"].as_str().unwrap().to_owned();
    let socket = host.path(&format!("run/{replica}.grpc.sock"));
    fs::rename(&socket, socket.with_extension("away")).unwrap();
    let between = Between::of(&host, |number, client, engine| {
        if number == 0 {
            let said = [take_over(&client, &engine), take_over(&engine, &client)];
            said.into_iter().for_each(|said| said.join().unwrap());
        }
    });
    let done = host.run(&["-o", "json", "snapshot", "create", volume]);
    drop(between);
    fs::rename(socket.with_extension("away"), &socket).unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    let list: Value = serde_json::from_str(&host.ok(&["-o", "json", "snapshot", "ls", volume])).unwrap();
    let name = list[0]["name"].as_str().unwrap();
    assert!(said.contains(name) && said.contains("was taken"), "{name}: {said}");
    host.ok(&["down", volume]);
}
