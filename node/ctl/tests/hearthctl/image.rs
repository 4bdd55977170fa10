//! `hearthctl image`.

use super::*;

#[tokio::test]
async fn images_are_trusted_listed_and_revoked() {
    let f = Fixture::new();
    let curator = TestCurator::start(&f.cluster, f.script(), wall_clock()).await;
    f.take_ownership(&curator).await;
    let digest = |byte: &str| byte.repeat(32);
    let file = f.home.path().join("measurements.json");
    let measured = json!({
        "version": 1,
        "uki_sha256": digest("01"),
        "bank": "sha256",
        "measurements": [{ "pcr": 11, "value": digest("ab") }],
        "programs": [digest("02"), digest("03"), digest("04")],
        "command_lines": [digest("05")],
    });
    std::fs::write(&file, measured.to_string()).expect("written");
    let file = file.to_str().expect("a path");
    let image = digest("ab");
    let said = f.ok(&["image", "trust", file]).await;
    assert_eq!(said, format!("image {image} is trusted\n"));
    let piped = f
        .command(&["image", "trust", "-"])
        .stdin(std::fs::File::open(file).expect("the file"))
        .output()
        .await
        .expect("it runs");
    assert_eq!(String::from_utf8_lossy(&piped.stdout), said);
    let listed = f.json(&["image", "list", "-o", "json"]).await;
    assert_eq!(listed[0]["parts"], json!(image));
    assert_eq!(listed[0]["programs"][2], json!(digest("04")));
    let table = f.ok(&["image", "list"]).await;
    assert!(
        table.starts_with("IMAGE") && table.contains(&image),
        "{table}"
    );

    let none = f.run(&["image", "revoke", "cd"]).await;
    let none = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(
        none.contains("0 trusted images begin with \"cd\""),
        "{none}"
    );
    let said = f.ok(&["image", "revoke", "abab"]).await;
    assert_eq!(said, format!("image {image} is not trusted any more\n"));
    let listed = f.json(&["image", "list", "-o", "json"]).await;
    assert_eq!(listed, json!([]));
}

#[tokio::test]
async fn a_file_that_is_no_measurements_is_refused_before_any_call() {
    let f = Fixture::new();
    let curator = TestCurator::start(&f.cluster, f.script(), wall_clock()).await;
    f.take_ownership(&curator).await;
    let file = f.home.path().join("measurements.json");
    std::fs::write(&file, "{}").expect("written");
    let refused = f
        .run(&["image", "trust", file.to_str().expect("a path")])
        .await;
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("measurements: expected JSON"), "{refused}");
    assert!(!curator.calls().contains(&"TrustImage"));
}
