//! Builds the shim, so that `cargo build` alone gives one binary that has it inside.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    for watched in [
        "shim/src",
        "shim/build.rs",
        "shim/Cargo.toml",
        "protocol/src",
        "protocol/Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    // The shim is written in x86-64's instructions. Elsewhere pyheap refuses to enter a process, so there is none to embed.
    if env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it") != "x86_64" {
        fs::write(out.join("shim.so"), []).expect("OUT_DIR can be written");
        println!("cargo::rustc-env=PYHEAP_COMMIT={}", commit(&root));
        return;
    }
    // A target directory of its own: the outer cargo holds the lock of the usual one.
    let target = out.join("shim");
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    cargo
        .args(["build", "--release", "--locked", "--manifest-path"])
        .arg(root.join("shim/Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        // Clippy's wrapper, coverage or other flags are meant for the host's code.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("CLIPPY_ARGS")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET");
    let status = cargo.status().expect("cargo could not be run for the shim");
    assert!(status.success(), "the shim did not build");
    let image = target.join("release/libpyheap_shim.so");
    copy(&image, &out.join("shim.so"));
    println!("cargo::rustc-env=PYHEAP_COMMIT={}", commit(&root));
}

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap_or_else(|error| panic!("copying {}: {error}", from.display()));
}

/// The commit that is being built, for `--version`; "unknown" outside of a checkout.
fn commit(root: &Path) -> String {
    // In a worktree `.git` is a file; and a file that is not there would have everything built anew each time.
    if let Some(head) = git(root, &["rev-parse", "--git-path", "HEAD"]) {
        println!("cargo::rerun-if-changed={}", root.join(head).display());
    }
    git(root, &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

fn git(root: &Path, words: &[&str]) -> Option<String> {
    let output = Command::new("git").args(words).current_dir(root).output().ok()?;
    let text = String::from_utf8(output.stdout)
        .ok()
        .filter(|_| output.status.success())?;
    Some(text.trim().to_owned())
}
