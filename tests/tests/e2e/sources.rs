//! The sources of parameters beside fw_cfg and the ESP, which the suite `parameters` has: strings of SMBIOS, and config
//! drives. The metadata services of clouds answer in the tests of `hearth-host`.

use std::convert::Infallible;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hearth_api::names::PORT_CURATOR;
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::hardware::MediumKind;
use hearth_qemu::network::{Link, Mac};
use hearth_qemu::smbios::{OemString, System};
use hearth_qemu::switch::{Lifetime, Network, NetworkOptions, WayOut};
use hearth_tests::node::{Node, Running};
use hearth_tests::owner::parameters_for_domain;
use hearth_tests::{Operator, Outcome, TestCtx, here};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::TcpListener;

/// As long as FAT allows.
const LABEL: &str = "HEARTH-CONF";

/// The parameters of a node whose cluster has this domain.
fn founding(node: &Node, domain: &str) -> Vec<u8> {
    parameters_for_domain(&node.owner, domain).encode_to_vec()
}

/// The node becomes HOME in a cluster with this domain.
async fn founds(vm: &Running, domain: &str) -> Outcome {
    vm.home().await?;
    let info = vm.owned().await?.info().await?;
    let found = info.configuration.context("no configuration")?;
    ensure!(found.cluster_domain == domain, "{}", found.cluster_domain);
    Ok(())
}

/// A volume of FAT, with this file.
async fn fat(node: &Node, name: &str, content: &[u8]) -> anyhow::Result<PathBuf> {
    let (volume, file) = (node.file("fat.img"), node.file("file"));
    std::fs::write(&file, content)?;
    let mut command = CommandLine::new("mkfs.vfat");
    command
        .option("-n", LABEL)
        .arg("-C")
        .arg(&volume)
        .arg("8192");
    tool::run(&command).await?;
    let mut command = CommandLine::new("mcopy");
    command
        .option("-i", &volume)
        .arg(&file)
        .arg(format!("::{name}"));
    tool::run(&command).await?;
    Ok(volume)
}

/// A volume of ISO 9660, with the parameters.
async fn iso9660(node: &Node, content: &[u8]) -> anyhow::Result<PathBuf> {
    let (volume, folder) = (node.file("iso.img"), node.file("folder"));
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("parameters.pb"), content)?;
    let mut command = CommandLine::new("genisoimage");
    command
        .arg("-quiet")
        .arg("-rational-rock")
        .option("-V", LABEL);
    command.option("-o", &volume).arg(&folder);
    tool::run(&command).await?;
    Ok(volume)
}

#[tokio::test]
async fn strings_of_smbios_are_enough() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.parameters = None;
    let text = STANDARD.encode(founding(&node, "smbios.example"));
    let (first, second) = text.split_at(text.len() / 2);
    node.smbios.oem_strings = [first, second]
        .map(|part| OemString(format!("dev.hearth.parameters={part}")))
        .into();
    let vm = node.power_on().await?;
    founds(&vm, "smbios.example").await?;
    vm.cut().await?;
    test.passed()
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_config_drive_with_fat_is_enough_and_smbios_goes_before_it() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.parameters = None;
    let empty = fat(&node, "other.pb", b"").await?;
    node.attach(&empty);
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    let wanted = "parameters from config drive HEARTH-CONF parameters.pb: /dev/vdb: expected a file parameters.pb";
    ensure!(refusal == wanted, "{refusal}");
    vm.cut().await?;

    std::fs::remove_file(&empty)?;
    fat(&node, "parameters.pb", &founding(&node, "drive.example")).await?;
    let text = STANDARD.encode(founding(&node, "smbios.example"));
    let wrong = OemString(format!("dev.hearth.parameters={text}="));
    node.smbios.oem_strings = vec![wrong];
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    let wanted = "parameters from SMBIOS dev.hearth.parameters: expected base64";
    ensure!(refusal.starts_with(wanted), "{refusal}");
    vm.cut().await?;

    node.smbios.oem_strings.clear();
    let vm = node.power_on().await?;
    founds(&vm, "drive.example").await?;
    vm.cut().await?;

    // A node needs none, whatever there is.
    let right = OemString(format!("dev.hearth.parameters={text}\n"));
    node.smbios.oem_strings = vec![right];
    let vm = node.power_on().await?;
    vm.says(&[
        " W ",
        "using the parameters from SMBIOS dev.hearth.parameters",
        "ignoring those from config drive HEARTH-CONF parameters.pb",
    ])
    .await?;
    founds(&vm, "drive.example").await?;
    vm.power_off().await?;
    test.passed()
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_config_drive_with_iso_9660_is_enough() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.parameters = None;
    let drive = iso9660(&node, &founding(&node, "iso.example")).await?;
    node.attach(&drive);
    let vm = node.power_on().await?;
    founds(&vm, "iso.example").await?;
    vm.power_off().await?;
    test.passed()
}

/// As hypervisors and management controllers attach one.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_config_drive_in_an_optical_drive_is_enough() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.parameters = None;
    let drive = iso9660(&node, &founding(&node, "disc.example")).await?;
    node.insert_medium(MediumKind::Disc, &drive).await?;
    let vm = node.power_on().await?;
    founds(&vm, "disc.example").await?;
    vm.power_off().await?;
    test.passed()
}

/// Firmware gets the unified kernel image over HTTP, from where DHCP says. The one on the disk is not one.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_image_over_http_takes_parameters_from_smbios() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    // Outside of the machines' network.
    let server = Ipv4Addr::new(192, 0, 2, 80);
    let port = listener.local_addr()?.port();
    let options = NetworkOptions {
        way_out: Some(WayOut::with_loopback_at(server)),
        boot_url: Some(format!("http://{server}:{port}/hearth.efi")),
        ..NetworkOptions::default()
    };
    let lifetime = Lifetime::KillWithParent;
    let folder = test.folder().join("net");
    let network = Network::start(&test.artifacts().switch, &folder, options.clone(), lifetime);
    let network = network.await?;
    let (mac, address) = (Mac::of_machine(1), options.machine_address(1));
    let port = network.add_port("node", mac, address).await?;
    let link = Link::Switch {
        socket: port.socket,
    };
    let plan = test.node("node").release().uefi().raw_disk();
    let plan = plan.without_card().card(1, link).boots_from_network();
    let mut node = plan.install().await?;
    node.disk().await?.replace_image(b"no program").await?;
    node.parameters = None;
    // PXE would be tried before HTTP, for minutes.
    for name in ["IPv4PXESupport", "IPv6PXESupport"] {
        let item = Item::bytes(&format!("opt/org.tianocore/{name}"), *b"n")?;
        node.more_fw_cfg.push(item);
    }
    let text = STANDARD.encode(founding(&node, "http.example"));
    node.smbios.oem_strings = vec![OemString(format!("dev.hearth.parameters={text}"))];
    let image = Bytes::from(std::fs::read(&test.artifacts().release.uki)?);
    let boots = async {
        let vm = node.power_on().await?;
        vm.home().await?;
        let curator = network.forward("node", PORT_CURATOR).await?;
        let owner = Operator::take_ownership(&node.owner, curator.into()).await?;
        let info = owner.info().await?;
        let found = info.configuration.context("no configuration")?;
        ensure!(
            found.cluster_domain == "http.example",
            "{}",
            found.cluster_domain
        );
        vm.power_off().await?;
        test.passed()
    };
    tokio::select! {
        outcome = boots => outcome,
        error = serve(&listener, &image) => Err(error.into()),
    }
}

/// Answers every request with this file; returns only on an error.
async fn serve(listener: &TcpListener, file: &Bytes) -> io::Error {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => return error,
        };
        let answer = |_: Request<Incoming>| {
            let response = Response::new(Full::new(file.clone()));
            std::future::ready(Ok::<_, Infallible>(response))
        };
        let connection = http1::Builder::new();
        let served = connection.serve_connection(TokioIo::new(stream), service_fn(answer));
        // The firmware asks again on a new connection.
        let _ = served.await;
    }
}

/// As the owner of a machine does it: an image and parameters on a disk, which firmware boots.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_hearthctl_has_written_boots_by_firmware() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").release().uefi().raw_disk();
    let mut node = plan.install().await?;
    node.parameters = None;
    let file = node.file("node.pb");
    std::fs::write(&file, founding(&node, "written.example"))?;
    let artifacts = test.artifacts();
    let mut write = CommandLine::new(&artifacts.hearthctl);
    write.arg("image").arg("write").arg(&artifacts.release.disk);
    write.arg(node.file("disk.img")).arg("--yes");
    write.option("--parameters", &file);
    tool::run(&write).await?;
    let vm = node.power_on().await?;
    founds(&vm, "written.example").await?;
    vm.power_off().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

/// Only a machine of a cloud asks its metadata service, and as long as nobody answers.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_machine_of_a_cloud_waits_for_its_metadata_service() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    node.parameters = None;
    for (vendor, product, source) in [
        ("Amazon EC2", "m7i.large", "EC2 user data"),
        (
            "Google",
            "Google Compute Engine",
            "Google Cloud attribute hearth-parameters",
        ),
    ] {
        node.smbios.system = Some(System {
            vendor: vendor.to_owned(),
            product: product.to_owned(),
        });
        let vm = node.power_on().await?;
        let why = vm.waits_in_the_end().await?;
        let wanted = format!("parameters from {source}: ");
        ensure!(
            why.starts_with(&wanted) && why.contains("metadata service"),
            "{why}"
        );
        vm.cut().await?;
    }
    // Parameters from elsewhere are used at once.
    node.parameters = Some(founding(&node, "fw-cfg.example"));
    let vm = node.power_on().await?;
    founds(&vm, "fw-cfg.example").await?;
    vm.cut().await?;
    test.passed()
}
