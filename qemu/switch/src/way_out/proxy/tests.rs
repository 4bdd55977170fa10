use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn settings(pairs: &[(&str, &str)]) -> ProxySettings {
    ProxySettings::of(|name| {
        let found = pairs.iter().find(|(one, _)| *one == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn proxy_to(pairs: &[(&str, &str)], destination: &str) -> Option<String> {
    let (proxies, wrong) = Proxies::new(&settings(pairs));
    assert_eq!(wrong, []);
    let destination = destination.parse().expect("an endpoint");
    proxies.to(destination).map(|proxy| format!("{proxy:?}"))
}

#[test]
fn the_port_decides_on_the_proxy() {
    let all = [
        ("HTTP_PROXY", "http://plain:3128"),
        ("https_proxy", "secure:3128/"),
        ("HTTPS_PROXY", "http://ignored"),
        ("ALL_PROXY", "http://[fd00::1]:1"),
    ];
    let to = |destination| proxy_to(&all, destination);
    assert_eq!(to("192.0.2.1:80").as_deref(), Some("plain:3128"));
    assert_eq!(to("192.0.2.1:443").as_deref(), Some("secure:3128"));
    assert_eq!(to("192.0.2.1:22").as_deref(), Some("fd00::1:1"));
    assert_eq!(proxy_to(&all[..3], "192.0.2.1:22"), None);
    assert_eq!(proxy_to(&[("ALL_PROXY", "")], "192.0.2.1:80"), None);
    let only_all = proxy_to(&[("all_proxy", "p")], "192.0.2.1:443");
    assert_eq!(only_all.as_deref(), Some("p:80"));
}

#[test]
fn exceptions_are_addresses_and_networks() {
    let to = |no_proxy, destination| {
        proxy_to(&[("ALL_PROXY", "p"), ("NO_PROXY", no_proxy)], destination).is_none()
    };
    let list = "example.com, 192.0.2.1,10.0.0.0/8 , 192.0.2.2:443,[fd00::1],fd01::/16, 1.2.3.4/33";
    for direct in [
        "192.0.2.1:80",
        "10.255.1.1:80",
        "192.0.2.2:443",
        "[fd00::1]:80",
        "[fd01:1::1]:80",
    ] {
        assert!(to(list, direct), "{direct}");
    }
    for proxied in ["192.0.2.2:80", "11.0.0.1:80", "1.2.3.4:80", "[fd02::1]:80"] {
        assert!(!to(list, proxied), "{proxied}");
    }
    assert!(to("*", "11.0.0.1:80"));
    assert!(to("0.0.0.0/0", "11.0.0.1:80"));
}

#[test]
fn a_proxy_that_cannot_be_used_is_reported_without_its_url() {
    for (url, expected) in [
        (
            "socks5://u:secret@p",
            ProxyError::Scheme("socks5".to_owned()),
        ),
        ("http://u:secret@", ProxyError::Url),
        ("http://u:secret@p:port", ProxyError::Url),
        ("http://[fd00::1", ProxyError::Url),
        ("http://a b", ProxyError::Url),
    ] {
        let (proxies, wrong) = Proxies::new(&settings(&[("HTTPS_PROXY", url)]));
        assert_eq!(wrong, [("HTTPS_PROXY", expected)]);
        assert!(proxies.is_empty());
        assert!(!format!("{wrong:?}{}", wrong[0].1).contains("secret"));
    }
    assert!(!format!("{:?}", settings(&[("HTTP_PROXY", "http://u:secret@p")])).contains("secret"));
}

#[test]
fn a_connection_is_requested_by_address() {
    let proxy = parse("http://us%65r:p%40ss@proxy:3128").expect("a proxy");
    let destination = "192.0.2.1:443".parse().expect("an endpoint");
    let expected = format!(
        "CONNECT 192.0.2.1:443 HTTP/1.1\r\nHost: 192.0.2.1:443\r\nProxy-Authorization: Basic {}\r\n\r\n",
        STANDARD.encode("user:p@ss")
    );
    assert_eq!(request(&proxy, destination), expected);
    assert!(!format!("{proxy:?}").contains("ss"));
    let plain = parse("proxy").expect("a proxy");
    let destination = "[2001:db8::1]:80".parse().expect("an endpoint");
    assert_eq!(
        request(&plain, destination),
        "CONNECT [2001:db8::1]:80 HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n"
    );
}

#[test]
fn only_a_status_of_success_is_one() {
    for accepted in [
        "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.0 200\n\n",
        "HTTP/1.1 204 x\r\nA: b\r\n\r\n",
    ] {
        assert!(is_complete(accepted.as_bytes()));
        assert_eq!(verdict(accepted.as_bytes()), Ok(()));
    }
    let refused = ProxyError::Refused("407 Proxy Authentication Required".to_owned());
    assert_eq!(
        verdict(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"),
        Err(refused)
    );
    for other in [
        "",
        "SSH-2.0-x\r\n\r\n",
        "HTTP/2 200\r\n\r\n",
        "HTTP/1.1 2\r\n\r\n",
        "HTTP/1.1 2x0\r\n\r\n",
    ] {
        assert_eq!(
            verdict(other.as_bytes()),
            Err(ProxyError::Answer),
            "{other:?}"
        );
    }
    assert!(!is_complete(b"HTTP/1.1 200 OK\r\nA: b\r\n"));
}

proptest! {
    #[test]
    fn anything_is_parsed(url: String, no_proxy: String, head in vec(any::<u8>(), 0..100)) {
        let (proxies, _) = Proxies::new(&ProxySettings {
            all: Some(url),
            no_proxy: Some(no_proxy),
            ..ProxySettings::default()
        });
        proxies.to(SocketAddr::from(([192, 0, 2, 1], 80)));
        let _ = verdict(&head);
    }
}
