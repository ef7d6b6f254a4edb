//! A cgroup for a test.

/// A cgroup of ours that limits memory or processes, below our own; gone on drop.
pub struct Cgroup(std::path::PathBuf);

/// The files that limit memory and processes, one of which is in a cgroup that can.
const MEMORY: &[&str] = &["memory.max", "memory.limit_in_bytes"];
const PROCESSES: &[&str] = &["pids.max"];

impl Cgroup {
    /// One that can limit memory.
    pub fn make() -> Option<Self> {
        Self::of("memory", MEMORY)
    }

    /// One in which there can be only so many processes and threads.
    pub fn of_processes(most: u32) -> Option<Self> {
        let group = Self::of("pids", PROCESSES)?;
        std::fs::write(group.file(PROCESSES)?, most.to_string()).ok()?;
        Some(group)
    }

    fn of(controller: &str, files: &[&str]) -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        static MADE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("pyheap-test-{}-{number}", std::process::id());
        let places = own.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            match (parts.next()?, parts.next()?) {
                ("", path) => Some(format!("/sys/fs/cgroup{path}")),
                (name, path) if name == controller => Some(format!("/sys/fs/cgroup/{controller}{path}")),
                _ => None,
            }
        });
        let groups = places.map(|place| std::path::Path::new(&place).join(&name));
        groups
            .filter(|group| std::fs::create_dir(group).is_ok())
            .map(Self)
            .find(|group| group.file(files).is_some())
    }

    fn file(&self, names: &[&str]) -> Option<std::path::PathBuf> {
        names.iter().map(|name| self.0.join(name)).find(|file| file.exists())
    }

    pub fn limit(&self, pid: &str, bytes: u64) -> bool {
        self.file(MEMORY)
            .is_some_and(|file| std::fs::write(file, bytes.to_string()).is_ok())
            && self.add(pid)
    }

    /// Puts a process into it.
    pub fn add(&self, pid: &str) -> bool {
        std::fs::write(self.0.join("cgroup.procs"), pid).is_ok()
    }

    /// Its folder.
    pub fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Who is in it goes back to where we are.
        let mut parent = self.0.clone();
        parent.pop();
        for pid in std::fs::read_to_string(self.0.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
        {
            let _ = std::fs::write(parent.join("cgroup.procs"), pid);
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}
