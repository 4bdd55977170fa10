//! Starts a machine: its files, its process, the handshake, its network.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_process::spawn::{self, Lifetime};
use tokio::time::{sleep, timeout};

use super::running::{KillOnDrop, LAST_WORDS, Running};
use super::wait;
use crate::command::{Boot, Machine, MachineError, Sockets};
use crate::fw_cfg::Content;
use crate::network::{self, Link, PortForward};
use crate::program::{self, ProgramError};
use crate::qmp::{Qmp, QmpError};
use crate::run_dir::{RunDir, RunDirError};
use crate::tpm::{self, Emulator, EndOnDrop, TpmError};

/// Interval of queries for states that QEMU does not report.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// A machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its configuration is invalid.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Its folder cannot be used.
    #[error("machine {machine:?}: {source}")]
    RunDir {
        /// Name of the machine.
        machine: String,
        /// The failed step.
        source: RunDirError,
    },
    /// QEMU is absent or too old.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A host port that it should have is in use.
    #[error(
        "machine {machine:?}: port {port} of this host is in use; choose another, or 0 for any free port"
    )]
    PortTaken {
        /// Name of the machine.
        machine: String,
        /// The host port.
        port: u16,
    },
    /// A card's switch is not running. QEMU itself would start, and never try again.
    #[error("machine {machine:?}: nothing listens on {socket}; start the switch first")]
    NoSwitch {
        /// Name of the machine.
        machine: String,
        /// Socket path of the switch.
        socket: PathBuf,
    },
    /// Its TPM could not be made or started.
    #[error("machine {machine:?}: TPM: {source}")]
    Tpm {
        /// Name of the machine.
        machine: String,
        /// The underlying error.
        source: TpmError,
    },
    /// QEMU did not start.
    #[error("machine {machine:?}: cannot start QEMU: {source}")]
    Spawn {
        /// Name of the machine.
        machine: String,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// QEMU rejected its command line.
    #[error("machine {machine:?}: QEMU ended at once ({status}); its output ({}):\n{words}", log.display())]
    Ended {
        /// Name of the machine.
        machine: String,
        /// How it ended.
        status: String,
        /// The end of its log.
        words: String,
        /// Path of the log.
        log: PathBuf,
    },
    /// QEMU is running, but QMP fails.
    #[error("machine {machine:?}: {source}")]
    Qmp {
        /// Name of the machine.
        machine: String,
        /// The underlying error.
        source: QmpError,
    },
    /// The process or its console cannot be watched.
    #[error("machine {machine:?}: cannot {step}: {source}")]
    Watch {
        /// Name of the machine.
        machine: String,
        /// The step that failed.
        step: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
}

/// A machine that has started.
pub(super) struct Up {
    pub(super) guard: KillOnDrop,
    pub(super) running: Arc<Running>,
    pub(super) qmp: Qmp,
    pub(super) forwards: Vec<PortForward>,
    pub(super) started: Instant,
}

/// Starts QEMU and waits until it is set up completely.
pub(super) async fn bring_up(
    machine: &Machine,
    run_dir: &RunDir,
    lifetime: Lifetime,
) -> Result<Up, StartError> {
    let name = &machine.name;
    let folder_error = |source| StartError::RunDir {
        machine: name.clone(),
        source,
    };
    let qmp_error = |source| StartError::Qmp {
        machine: name.clone(),
        source,
    };
    // For the script; and an invalid machine is detected before anything is written.
    let by_hand = machine.command(run_dir, Sockets::Made)?;
    program::check().await?;
    check_ports(machine)?;
    prepare(machine, run_dir).map_err(folder_error)?;
    let before = machine.tpm.map(|_| tpm::by_hand(run_dir).to_script());
    run_dir
        .write_script(&before.unwrap_or_default(), &by_hand.to_script())
        .map_err(folder_error)?;
    let tpm =
        match machine.tpm {
            Some(_) => Some(Emulator::start(run_dir, lifetime).await.map_err(|source| {
                StartError::Tpm {
                    machine: name.clone(),
                    source,
                }
            })?),
            None => None,
        };

    let started = Instant::now();
    let running = spawn_qemu(machine, run_dir, lifetime, EndOnDrop(tpm)).await?;
    let guard = KillOnDrop(Some(running.clone()));
    let qmp = match shake_hands(run_dir, started).await {
        Ok(qmp) => qmp,
        Err(error) => return Err(not_up(name, run_dir, &running, error).await),
    };
    if let Some(socket) = not_plugged(machine, &qmp).await.map_err(qmp_error)? {
        return Err(StartError::NoSwitch {
            machine: name.clone(),
            socket,
        });
    }
    let forwards = forwards(machine, &qmp).await.map_err(qmp_error)?;
    Ok(Up {
        guard,
        running,
        qmp,
        forwards,
        started,
    })
}

/// QEMU would report it too, but less clearly and after everything else is done.
fn check_ports(machine: &Machine) -> Result<(), StartError> {
    let taken = machine
        .nics
        .iter()
        .filter_map(|nic| match &nic.link {
            Link::User(user) => Some(&user.forwards),
            Link::Unplugged | Link::Switch { .. } => None,
        })
        .flatten()
        .find(|forward| !network::is_free(forward.host));
    match taken {
        Some(forward) => Err(StartError::PortTaken {
            machine: machine.name.clone(),
            port: forward.host,
        }),
        None => Ok(()),
    }
}

/// Creates the files that QEMU needs.
fn prepare(machine: &Machine, run_dir: &RunDir) -> Result<(), RunDirError> {
    run_dir.rotate_logs()?;
    if let Boot::Uefi(firmware) = &machine.boot {
        run_dir.make_vars(&firmware.vars)?;
    }
    for (card, nic) in machine.nics.iter().enumerate() {
        if let Link::Switch { socket } = &nic.link {
            run_dir.make_link(card, socket)?;
        }
    }
    for (number, item) in machine.fw_cfg.iter().enumerate() {
        if let Content::Bytes(bytes) = &item.content {
            run_dir
                .folder()
                .write_private(&run_dir.fw_cfg(number), bytes)?;
        }
    }
    for (number, string) in machine.smbios.oem_strings.iter().enumerate() {
        let path = run_dir.smbios(number);
        run_dir.folder().write_private(&path, string.0.as_bytes())?;
    }
    Ok(())
}

async fn spawn_qemu(
    machine: &Machine,
    run_dir: &RunDir,
    lifetime: Lifetime,
    mut tpm: EndOnDrop,
) -> Result<Arc<Running>, StartError> {
    let folder_error = |source| StartError::RunDir {
        machine: machine.name.clone(),
        source,
    };
    let spawn_error = |source| StartError::Spawn {
        machine: machine.name.clone(),
        source,
    };
    let qmp = run_dir
        .folder()
        .listen(&run_dir.qmp_socket())
        .map_err(folder_error)?;
    let control = run_dir
        .folder()
        .listen(&run_dir.control_socket())
        .map_err(folder_error)?;
    let sockets = Sockets::Inherited {
        qmp: qmp.as_raw_fd(),
        control: control.as_raw_fd(),
    };
    let line = machine.command(run_dir, sockets)?;
    tracing::debug!(target: "hearth_qemu::command", "{line}");

    let log = File::options()
        .append(true)
        .open(run_dir.qemu_log())
        .map_err(spawn_error)?;
    let mut command = line.to_std();
    command
        .current_dir(run_dir.path())
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(spawn_error)?)
        .stderr(log);
    // Ours are closed with the command: then the end of QEMU before it has accepted the connection ends the connection,
    // too.
    let inherited: Arc<[OwnedFd]> = Arc::from([OwnedFd::from(qmp), OwnedFd::from(control)]);
    let child = spawn::spawn(command, lifetime, inherited)
        .await
        .map_err(spawn_error)?;
    let running = Running::of_child(child).map_err(spawn_error)?;
    Ok(Arc::new(running.with_tpm(tpm.0.take())))
}

async fn shake_hands(run_dir: &RunDir, started: Instant) -> Result<Qmp, QmpError> {
    let stream = run_dir.folder().connect(&run_dir.qmp_socket()).await?;
    Qmp::handshake(stream, &run_dir.qmp_log(), started).await
}

/// Why QEMU did not start: usually because it ended, with the reason in its log.
async fn not_up(name: &str, run_dir: &RunDir, running: &Running, source: QmpError) -> StartError {
    let ended = timeout(LAST_WORDS, running.process.ended()).await.is_ok();
    match running.reap() {
        Ok(Some(status)) if ended => StartError::Ended {
            machine: name.to_owned(),
            status: status.to_string(),
            words: wait::end_of(&run_dir.qemu_log()),
            log: run_dir.qemu_log(),
        },
        _ => StartError::Qmp {
            machine: name.to_owned(),
            source,
        },
    }
}

/// Queries the host ports that QEMU chose.
async fn forwards(machine: &Machine, qmp: &Qmp) -> Result<Vec<PortForward>, QmpError> {
    let user = |link: &Link| matches!(link, Link::User(user) if !user.forwards.is_empty());
    if !machine.nics.iter().any(|nic| user(&nic.link)) {
        return Ok(Vec::new());
    }
    Ok(network::parse_usernet(&qmp.human("info usernet").await?))
}

/// The first switch that a card could not be connected to, if there is one.
async fn not_plugged(machine: &Machine, qmp: &Qmp) -> Result<Option<PathBuf>, QmpError> {
    for (card, nic) in machine.nics.iter().enumerate() {
        let Link::Switch { socket } = &nic.link else {
            continue;
        };
        let plugged = async {
            loop {
                let text = qmp.human("info network").await?;
                match network::parse_plugged(&text, card) {
                    Some(plugged) => return Ok::<_, QmpError>(plugged),
                    // In progress; QEMU reports success by an event, and does not report failure.
                    None => sleep(ASK_AGAIN).await,
                }
            }
        };
        // A socket of this host is available at once or never.
        if !timeout(LAST_WORDS, plugged).await.unwrap_or(Ok(false))? {
            return Ok(Some(socket.clone()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;
    use crate::accel::Accel;
    use crate::fw_cfg::Item;
    use crate::network::{Forward, Mac, Nic, UserNetwork};
    use crate::qmp::fake;

    fn with_card(link: Link) -> Machine {
        let mac = Mac::of_machine(0);
        Machine {
            nics: vec![Nic { mac, link }],
            ..Machine::new("guest", Accel::Tcg)
        }
    }

    fn on_switch() -> Machine {
        with_card(Link::Switch {
            socket: "/net/node-0.sock".into(),
        })
    }

    /// The state of the card in QEMU's monitor.
    fn card(state: &str) -> String {
        format!("virtio-net-pci.0: index=0,type=nic\r\n \\ net0: index=0,type=stream,{state}\r\n")
    }

    #[test]
    fn a_port_that_is_taken_is_found_before_anything_is_started() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        let mut network = UserNetwork {
            restricted: true,
            forwards: vec![
                Forward::any(1),
                Forward {
                    guest: 2,
                    host: port,
                },
            ],
        };
        let error = check_ports(&with_card(Link::User(network.clone()))).expect_err("taken");
        assert!(
            matches!(&error, StartError::PortTaken { port: taken, .. } if *taken == port),
            "{error}"
        );
        network.forwards.pop();
        check_ports(&with_card(Link::User(network))).expect("free");
    }

    #[test]
    fn what_qemu_is_to_find_is_there_and_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        let mut machine = on_switch();
        machine.fw_cfg = vec![Item::bytes("opt/x", "secret").expect("a name")];
        prepare(&machine, &run_dir).expect("prepared");
        let link = run_dir.file("net0.sock").read_link().expect("a link");
        assert_eq!(link, PathBuf::from("/net/node-0.sock"));
        let metadata = run_dir.fw_cfg(0).metadata().expect("a file");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read(run_dir.qmp_log()).expect("a log"), b"");
    }

    #[tokio::test(start_paused = true)]
    async fn qemu_that_ended_is_known_by_its_words_and_one_that_lives_by_its_silence() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        std::fs::write(run_dir.qemu_log(), "no such machine\n").expect("a log");
        let closed = || QmpError::Closed("the greeting".to_owned());
        let child = Command::new("sh").args(["-c", "exit 1"]).spawn();
        let running = Running::of_child(child.expect("sh")).expect("its descriptor");
        assert!(running.process.ended_within(Duration::from_secs(60)));
        match not_up("guest", &run_dir, &running, closed()).await {
            StartError::Ended { words, status, .. } => {
                assert!(words.contains("no such machine"), "{words}");
                assert!(status.contains('1'), "{status}");
            }
            error => panic!("{error}"),
        }
        let child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let running = Arc::new(Running::of_child(child).expect("its descriptor"));
        let _guard = KillOnDrop(Some(running.clone()));
        let error = not_up("guest", &run_dir, &running, closed()).await;
        assert!(matches!(error, StartError::Qmp { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_card_is_asked_for_until_it_is_plugged_in_or_never_will_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let (qmp, peer) = fake::connected(folder.path(), b"").await;
        let answers = vec![card("initializing"), card("unix:net0.sock")];
        let machine = on_switch();
        let (found, peer) = tokio::join!(not_plugged(&machine, &qmp), fake::monitor(peer, answers));
        assert_eq!(found.expect("asked"), None);
        let (found, _peer) = tokio::join!(
            not_plugged(&machine, &qmp),
            fake::monitor(peer, vec![card("connection error")])
        );
        assert_eq!(found.expect("asked"), Some("/net/node-0.sock".into()));
    }

    #[tokio::test]
    async fn ports_are_asked_for_only_where_there_are_some() {
        let folder = tempfile::tempdir().expect("a folder");
        let (qmp, peer) = fake::connected(folder.path(), b"").await;
        // The peer does not answer.
        let none = forwards(&with_card(Link::User(UserNetwork::default())), &qmp).await;
        assert_eq!(none.expect("not asked"), []);
        let network = UserNetwork {
            restricted: true,
            forwards: vec![Forward::any(7835)],
        };
        let said = "  TCP[HOST_FORWARD]  10  127.0.0.1 40789  10.0.2.15  7835  0  0\r\n".to_owned();
        let machine = with_card(Link::User(network));
        let (told, _peer) = tokio::join!(forwards(&machine, &qmp), fake::monitor(peer, vec![said]));
        let host = "127.0.0.1:40789".parse().expect("an address");
        assert_eq!(told.expect("told"), [PortForward { guest: 7835, host }]);
    }
}
