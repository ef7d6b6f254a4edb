//! Link arguments of the freestanding image.

fn main() {
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-Wl,--no-undefined",
        "-Wl,--build-id=none",
        "-Wl,-z,norelro",
        "-Wl,-z,noexecstack",
        "-Wl,-z,max-page-size=4096",
        "-Wl,--gc-sections",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
