//! The manifests in deploy/: that they are YAML, ask for no more rights than they need, and start pyheap with options that it has.

use crate::common;
use crate::common::pyheap;
use std::path::PathBuf;
use yaml_rust2::{Yaml, YamlLoader};

fn read(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn load(name: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&read(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// What is at a path of keys and numbers.
#[track_caller]
fn at<'a>(mut yaml: &'a Yaml, path: &str) -> &'a Yaml {
    for key in path.split('.') {
        yaml = match key.parse::<usize>() {
            Ok(place) => &yaml[place],
            Err(_) => &yaml[key],
        };
        assert!(!yaml.is_badvalue(), "no {key} of {path}");
    }
    yaml
}

fn words(yaml: &Yaml) -> Vec<String> {
    let word = |yaml: &Yaml| yaml.as_str().expect("a word").to_owned();
    yaml.as_vec().expect("a list").iter().map(word).collect()
}

/// That pyheap understands these words: it gets as far as to look for a process that is not there.
#[track_caller]
fn assert_understood(words: &[String]) {
    let scratch = common::scratch();
    let token = scratch.path().join("token");
    std::fs::write(&token, "c0rrect-horse").unwrap();
    let mut words: Vec<String> = words
        .iter()
        .map(|word| match word.as_str() {
            // `--all` would serve this machine's.
            "--all" => "--tree=2000000000".to_owned(),
            "1" => "2000000000".to_owned(),
            "--token-file=/token/token" => format!("--token-file={}", token.display()),
            word => word.replace("0.0.0.0:6060", "127.0.0.1:0"),
        })
        .collect();
    if !words.iter().any(|word| word.contains("2000000000")) {
        words.push("2000000000".to_owned());
    }
    pyheap::run(&words).expect_code(3);
}

fn assert_modest(container: &Yaml) {
    let security = at(container, "securityContext");
    assert_eq!(at(security, "privileged").as_bool(), Some(false));
    assert_eq!(at(security, "allowPrivilegeEscalation").as_bool(), Some(false));
    assert_eq!(at(security, "readOnlyRootFilesystem").as_bool(), Some(true));
    assert_eq!(words(at(security, "capabilities.drop")), ["ALL"]);
    assert_eq!(words(at(security, "capabilities.add")), ["SYS_PTRACE"]);
    assert_eq!(at(container, "livenessProbe.httpGet.path").as_str(), Some("/healthz"));
    assert_eq!(at(container, "ports.0.containerPort").as_i64(), Some(6060));
}

#[test]
fn the_sidecar() {
    let [pod] = &load("sidecar.yaml")[..] else {
        panic!("one document")
    };
    assert_eq!(at(pod, "kind").as_str(), Some("Pod"));
    assert_eq!(at(pod, "spec.shareProcessNamespace").as_bool(), Some(true));
    let pyheap = at(pod, "spec.containers.1");
    assert_modest(pyheap);
    assert_understood(&words(at(pyheap, "args")));
}

#[test]
fn the_daemonset() {
    let [_, secret, set] = &load("daemonset.yaml")[..] else {
        panic!("three documents")
    };
    assert!(
        at(secret, "stringData.token")
            .as_str()
            .is_some_and(|token| token.len() >= 8)
    );
    assert_eq!(at(set, "kind").as_str(), Some("DaemonSet"));
    let spec = at(set, "spec.template.spec");
    assert_eq!(at(spec, "hostPID").as_bool(), Some(true));
    let pyheap = at(spec, "containers.0");
    assert_modest(pyheap);
    let args = words(at(pyheap, "args"));
    assert!(args.iter().any(|word| word == "--token-file=/token/token"));
    assert_eq!(at(pyheap, "volumeMounts.0.mountPath").as_str(), Some("/token"));
    assert_understood(&args);
    assert_eq!(
        at(set, "spec.selector.matchLabels.app"),
        at(set, "spec.template.metadata.labels.app")
    );
}

#[test]
fn the_composition() {
    let [all] = &load("compose.yaml")[..] else {
        panic!("one document")
    };
    let pyheap = at(all, "services.pyheap");
    assert_eq!(
        (words(at(pyheap, "cap_drop")), words(at(pyheap, "cap_add"))),
        (vec!["ALL".into()], vec!["SYS_PTRACE".into()])
    );
    assert_eq!(at(pyheap, "read_only").as_bool(), Some(true));
    assert!(
        words(at(pyheap, "ports"))
            .iter()
            .all(|port| port.starts_with("127.0.0.1:"))
    );
    assert_understood(&words(at(pyheap, "command")));
    let mounted = at(all, "services.alloy.volumes.0").as_str().unwrap();
    assert!(mounted.starts_with("./pyroscope.alloy:"));
}

/// The scrapers ask for what is there.
#[test]
fn the_scrapers() {
    let [parca] = &load("parca.yaml")[..] else {
        panic!("one document")
    };
    let config = at(parca, "scrape_configs.0.profiling_config.pprof_config");
    assert_eq!(at(config, "memory.path").as_str(), Some("/debug/pprof/heap"));
    for off in ["process_cpu", "goroutine", "block", "mutex"] {
        assert_eq!(at(config, &format!("{off}.enabled")).as_bool(), Some(false));
    }
    let [prometheus] = &load("prometheus.yaml")[..] else {
        panic!("one document")
    };
    assert_eq!(at(prometheus, "scrape_configs.0.job_name").as_str(), Some("pyheap"));
    let alloy = read("pyroscope.alloy");
    let depth = |c| alloy.matches(c).count();
    assert_eq!((depth('{'), depth('[')), (depth('}'), depth(']')));
    assert!(alloy.contains("path    = \"/debug/pprof/allocs\"") && alloy.contains("params = {\"labels\" = [\"0\"]}"));
    for off in ["process_cpu", "goroutine", "block", "mutex"] {
        assert!(
            alloy.contains(&format!("profile.{off} {{\n      enabled = false")),
            "{off}"
        );
    }
}

#[test]
fn the_image_holds_one_static_binary() {
    let docker = read("Dockerfile");
    let last = docker.split("\nFROM ").last().unwrap();
    assert!(
        last.starts_with("scratch\n") && last.contains("ENTRYPOINT [\"/pyheap\"]"),
        "{last}"
    );
    assert!(docker.contains("--target x86_64-unknown-linux-musl") && docker.contains("--locked"));
}
