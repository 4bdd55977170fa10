//! Situations in which users of other clusters were surprised, tried with kubectl on one machine.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_tests::kubernetes::{IMAGE_PORT, VOLUME};
use hearth_tests::{Cluster, Kubernetes, Outcome, TestCtx, bounds, here};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// Writes less than the kubelet keeps in one file of a log, then more than that. A follower that has not reached the end of
/// the file before it is replaced stays there: it is the kubelet's.
const TALK: &str = "yes $(printf %0999d 0) | head -c 10000000
echo waiting
until test -e /more; do sleep 1; done
yes $(printf %0999d 0) | head -c 2000000
until test -e /go; do sleep 1; done
echo after the rotation
sleep 3600";

/// Answers each datagram at this port with the pod's name, whoever sends it.
const ANSWER: &str = "while :; do hostname | timeout 60 nc -u -l -p 5300; done";

/// A program of 145 bytes that reads the time as programs before glibc 2.14 do, by a call to the page of vsyscalls, and
/// fails if there is none: `(exit (= 0 ((time *)0xffffffffff600400)(NULL)))`.
const OLD_PROGRAM: &[u8] =
    b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0\x78\0\x40\0\0\0\0\0\
\x40\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x40\0\x38\0\x01\0\0\0\0\0\0\0\
\x01\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0\x40\0\0\0\0\0\
\x91\0\0\0\0\0\0\0\x91\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\
\x31\xff\x48\xc7\xc0\0\x04\x60\xff\xff\xd0\x48\x85\xc0\x40\x0f\x94\xc7\xb8\x3c\0\0\0\x0f\x05";

/// Redirects what root sends to port 9 of the pod's loopback address, by rules of the pod's own.
const REDIRECT: &str = "nsenter -t 1 -m /ext/kubernetes/bin/nft 'add table ip own
add chain ip own out { type nat hook output priority -100; }
add rule ip own out meta skuid 0 tcp dport 9 redirect to :8080'
wget -q -O - http://127.0.0.1:9/cgi-bin/hostname";

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_surprised_others_works() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| plan.kubernetes()).await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    let privileged = |spec: &mut Value| {
        spec["hostPID"] = true.into();
        spec["containers"][0]["securityContext"] = json!({ "privileged": true });
    };
    kubernetes
        .kubectl(&[
            "label",
            "namespace",
            "default",
            "pod-security.kubernetes.io/enforce=privileged",
        ])
        .await?;
    kubernetes.probe_as("machine", &node, privileged).await?;
    kubernetes.probe("server", &node).await?;

    logs_are_followed_over_a_rotation(&kubernetes, &node).await?;
    a_port_is_forwarded_after_a_reset(&kubernetes).await?;
    a_part_of_a_volume_is_mounted(&kubernetes, &node).await?;
    datagrams_follow_their_service(&kubernetes, &node).await?;
    the_address_of_a_client_is_kept(&kubernetes, &node).await?;
    mounts_of_drivers_reach_the_machine(&kubernetes, &node).await?;
    a_pod_reaches_itself_through_its_service(&kubernetes, &node).await?;
    an_old_program_reads_the_time(&kubernetes).await?;
    kubernetes
        .says("machine", REDIRECT, |said| said.trim() == "machine")
        .await?;
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// Starts kubectl, which goes on until it is dropped; its output by lines.
fn start(
    kubernetes: &Kubernetes,
    words: &[&str],
) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
    let mut child = Command::from(kubernetes.command(words).to_std())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start kubectl")?;
    let said = child.stdout.take().context("no output")?;
    Ok((child, BufReader::new(said).lines()))
}

/// `kubectl logs -f` shows what is written after the kubelet has begun another file.
async fn logs_are_followed_over_a_rotation(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let talk = |spec: &mut Value| {
        spec["containers"][0]["command"] = json!(["sh", "-c", TALK]);
    };
    kubernetes.probe_as("talker", node, talk).await?;
    let (_follower, mut lines) = start(kubernetes, &["logs", "--follow", "talker"])?;
    let until = async |lines: &mut Lines<_>, wanted: &str| {
        let found = async {
            while let Some(line) = Lines::next_line(lines).await? {
                if line == wanted {
                    return Ok(());
                }
            }
            bail!("kubectl ended before {wanted:?}")
        };
        let found = tokio::time::timeout(bounds::WORKLOAD, found).await;
        found.with_context(|| format!("no line {wanted:?}"))?
    };
    until(&mut lines, "waiting").await?;
    let touch = async |file: &str| {
        let words = ["exec", "talker", "--", "touch", file];
        kubernetes.kubectl(&words).await.map(drop)
    };
    touch("/more").await?;
    // Where /var/log of the node leads to: a pod would follow that link in its own files.
    let files = "ls /proc/1/root/data/kubernetes/log/pods/default_talker_*/*/ | wc -l";
    kubernetes
        .says("machine", files, |files| files.trim() == "2")
        .await?;
    touch("/go").await?;
    until(&mut lines, "after the rotation").await
}

/// `kubectl port-forward` goes on when a client has reset its connection.
async fn a_port_is_forwarded_after_a_reset(kubernetes: &Kubernetes) -> Outcome {
    let port = format!(":{IMAGE_PORT}");
    let (mut forward, mut lines) = start(kubernetes, &["port-forward", "pod/server", &port])?;
    let first = tokio::time::timeout(bounds::WORKLOAD, lines.next_line()).await;
    let first = first
        .context("kubectl says nothing")??
        .context("kubectl has ended")?;
    // "Forwarding from 127.0.0.1:40123 -> 8080"
    let address = first.split_whitespace().nth(2).context(first.clone())?;
    for _ in 0..3 {
        let address = address.to_owned();
        let answer = tokio::task::spawn_blocking(move || {
            reset(&address)?;
            ask(&address)
        });
        let answer = answer.await??;
        ensure!(answer.trim_end().ends_with("server"), "{answer:?}");
    }
    ensure!(forward.try_wait()?.is_none(), "kubectl has ended");
    Ok(())
}

/// Asks for half of something, and resets the connection.
fn reset(address: &str) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /cgi-bin/hostname HTTP/1.0\r\n")?;
    Ok(rustix::net::sockopt::set_socket_linger(
        &stream,
        Some(Duration::ZERO),
    )?)
}

fn ask(address: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(bounds::CALL))?;
    stream.write_all(b"GET /cgi-bin/hostname HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A file of a config map in a folder that has others, and a folder of a volume.
async fn a_part_of_a_volume_is_mounted(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let map = [
        "create",
        "configmap",
        "parts",
        "--from-literal=one=first",
        "--from-literal=two=2",
    ];
    kubernetes.kubectl(&map).await?;
    let parts = |spec: &mut Value| {
        spec["volumes"] = json!([
            { "name": "map", "configMap": { "name": "parts" } },
            { "name": "scratch", "emptyDir": {} },
        ]);
        spec["containers"][0]["volumeMounts"] = json!([
            { "name": "map", "mountPath": "/etc/one", "subPath": "one" },
            { "name": "scratch", "mountPath": VOLUME, "subPath": "deep/er" },
        ]);
    };
    kubernetes.probe_as("parts", node, parts).await?;
    let script = format!("cat /etc/one && test ! -e /etc/two && echo > {VOLUME}/it && echo -done");
    kubernetes
        .says("parts", &script, |said| said.trim() == "first-done")
        .await
}

/// A client that always sends from the same port reaches the pod that has taken the place of another.
async fn datagrams_follow_their_service(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let answer = |spec: &mut Value| {
        spec["containers"][0]["command"] = json!(["sh", "-c", ANSWER]);
    };
    kubernetes
        .create(&json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "datagrams" },
            "spec": {
                "selector": { "kind": "datagrams" },
                "ports": [{ "port": 5300, "protocol": "UDP" }],
            },
        }))
        .await?;
    let ask = "echo | timeout 5 nc -u -w 2 -p 6000 datagrams 5300";
    for pod in ["before", "after"] {
        kubernetes.probe_as(pod, node, answer).await?;
        let label = ["label", "pod", pod, "kind=datagrams"];
        kubernetes.kubectl(&label).await?;
        kubernetes
            .says("server", ask, |said| said.trim() == pod)
            .await?;
        if pod == "before" {
            kubernetes
                .kubectl(&["delete", "pod", pod, "--wait=false"])
                .await?;
        }
    }
    Ok(())
}

/// What the pod of a storage driver mounts at the path that drivers have compiled in is mounted on the machine.
async fn mounts_of_drivers_reach_the_machine(kubernetes: &Kubernetes, node: &str) -> Outcome {
    const PODS: &str = "/var/lib/kubelet/pods";
    let driver = |spec: &mut Value| {
        spec["volumes"] = json!([{ "name": "pods", "hostPath": { "path": PODS } }]);
        let container = &mut spec["containers"][0];
        container["securityContext"] = json!({ "privileged": true });
        container["volumeMounts"] = json!([
            { "name": "pods", "mountPath": PODS, "mountPropagation": "Bidirectional" },
        ]);
    };
    kubernetes.probe_as("driver", node, driver).await?;
    let mounted = format!("nsenter -t 1 -m cat /proc/mounts | grep {PODS}/driver | wc -l");
    for (script, count) in [
        (
            format!("mkdir {PODS}/driver; mount -t tmpfs none {PODS}/driver"),
            "1",
        ),
        (format!("umount {PODS}/driver; rmdir {PODS}/driver"), "0"),
    ] {
        let words = ["exec", "driver", "--", "sh", "-c", &script];
        kubernetes.kubectl(&words).await?;
        kubernetes
            .says("machine", &mounted, |said| said.trim() == count)
            .await?;
    }
    Ok(())
}

/// With `externalTrafficPolicy: Local` a pod sees the address of a client outside the cluster.
async fn the_address_of_a_client_is_kept(kubernetes: &Kubernetes, node: &str) -> Outcome {
    kubernetes
        .create(&json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "outside" },
            "spec": {
                "type": "NodePort",
                "externalTrafficPolicy": "Local",
                "selector": { "app": "server" },
                "ports": [{ "port": 80, "targetPort": IMAGE_PORT, "nodePort": 30080 }],
            },
        }))
        .await?;
    let node = kubernetes.get(&["node", node]).await?;
    let addresses = node["status"]["addresses"]
        .as_array()
        .context("no addresses")?;
    let own = addresses.iter().find(|one| one["type"] == "InternalIP");
    let own = own
        .and_then(|one| one["address"].as_str())
        .context("no address")?;
    // The machine itself is outside the pods' network.
    let ask = format!("nsenter -t 1 -n wget -q -O - http://{own}:30080/cgi-bin/hostname");
    kubernetes
        .says("machine", &ask, |said| said.trim() == "server")
        .await?;
    let logs = kubernetes.kubectl(&["logs", "server"]).await?;
    ensure!(logs.contains(own), "{own} is not in {logs}");
    Ok(())
}

/// The only pod of a service is a client of that service.
async fn a_pod_reaches_itself_through_its_service(kubernetes: &Kubernetes, node: &str) -> Outcome {
    kubernetes.probe("mirror", node).await?;
    let port = format!("--target-port={IMAGE_PORT}");
    kubernetes
        .kubectl(&["expose", "pod", "mirror", "--port=80", &port])
        .await?;
    let ask = "timeout 5 wget -q -O - http://mirror.default/cgi-bin/hostname";
    kubernetes
        .says("mirror", ask, |said| said.trim() == "mirror")
        .await
}

async fn an_old_program_reads_the_time(kubernetes: &Kubernetes) -> Outcome {
    let escaped = |byte: &u8| format!("\\{byte:03o}");
    let program: String = OLD_PROGRAM.iter().map(escaped).collect();
    let script = format!("printf '{program}' > /old && chmod +x /old && /old && echo works");
    kubernetes
        .says("server", &script, |said| said.trim() == "works")
        .await
}
