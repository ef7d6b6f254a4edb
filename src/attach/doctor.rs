//! Everything that can stand between pyheap and a process, one line each: `pyheap doctor`.
//!
//! The questions are those that an attach asks before it enters ([`preflight`], [`session`]), and the answers are theirs; what is
//! added is what each rests on, and the words that help. Nothing is stopped or written: of seccomp filters, which the kernel shows
//! of a stopped thread only, only that there are some is told, unless the caller allows that stop.

use super::headroom;
use super::interpreter::Interpreter;
use super::place::Place;
use super::preflight::{self, NoPermission, Refusal, Target};
use super::process::{Facts, MemoryUse};
use super::session::{self, AttachError};
use super::{FindError, candidates};
use crate::report::human::bytes;
use procfs::process::{Process, Status};
use pyheap_injector::infect::Found;
use pyheap_injector::observe;
use pyheap_injector::region::Sizes;
use pyheap_injector::seccomp::{self, Forbidden};
use serde::Serialize;

/// The bit of `CAP_SYS_PTRACE` in `CapEff`.
const CAP_SYS_PTRACE: u64 = 1 << 19;
/// A thread that was stopped stands still for so long, in microseconds: the usual, and on a busy machine. docs/safety.md.
const STOP_MICROS: (u64, u64) = (36, 1000);
/// A memory cgroup without limit has this much room.
const NO_LIMIT: u64 = 1 << 60;
/// Labels of security modules are not read further.
const MAX_LABEL_BYTES: usize = 256;
/// More threads make an attach take noticeably longer: each is looked at.
const MANY_THREADS: u64 = 1000;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Nothing stands in the way here.
    Ok,
    /// It may.
    Warn,
    /// It does.
    Fail,
}

/// One line.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub text: String,
    /// What helps, in words that can be typed.
    pub remedy: Vec<String>,
    /// The exit code of this cause; 0 unless it fails.
    pub code: u8,
}

/// What an attach would cost.
#[derive(Debug, Clone, Serialize)]
pub struct Cost {
    /// One thread stands still for so long at the attach, usually; in microseconds.
    pub stop_micros: u64,
    /// And on a busy machine.
    pub stop_micros_busy: u64,
    /// Address space that the hooks and their tables take.
    pub address_space_bytes: u64,
    /// Of that, memory, when all tables are full.
    pub memory_bytes_at_most: u64,
    /// The share of the process's CPU time that sampling is kept below by default.
    pub cpu_share_at_most: f64,
}

/// All lines.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnosis {
    /// The process; `None` if only the host was looked at.
    pub pid: Option<i32>,
    /// Everything that was looked at.
    pub checks: Vec<Finding>,
    /// What an attach would cost, where it is possible.
    pub cost: Option<Cost>,
}

impl Diagnosis {
    /// The code of the first cause that fails; 0 if none does.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.checks
            .iter()
            .find(|one| one.level == Level::Fail)
            .map_or(0, |one| one.code)
    }

    /// How many lines are of `level`.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.checks.iter().filter(|one| one.level == level).count()
    }

    fn add(&mut self, check: &'static str, level: Level, text: impl Into<String>) -> &mut Finding {
        let code = if level == Level::Fail { code::OTHER } else { 0 };
        self.checks.push(Finding {
            check,
            level,
            text: text.into(),
            remedy: Vec::new(),
            code,
        });
        let last = self.checks.len() - 1;
        &mut self.checks[last]
    }

    fn ok(&mut self, check: &'static str, text: impl Into<String>) {
        self.add(check, Level::Ok, text);
    }

    fn warn(&mut self, check: &'static str, text: impl Into<String>, remedy: &[String]) {
        self.add(check, Level::Warn, text).remedy = remedy.to_vec();
    }

    fn fail(&mut self, check: &'static str, code: u8, text: impl Into<String>, remedy: Vec<String>) {
        let finding = self.add(check, Level::Fail, text);
        (finding.code, finding.remedy) = (code, remedy);
    }
}

/// Exit codes of `pyheap doctor`: the first digit is the code with which `pyheap record` would end, the second one the cause.
pub mod code {
    /// There is no such process.
    pub const NO_PROCESS: u8 = 30;
    /// It has ended.
    pub const ENDED: u8 = 31;
    /// The number is that of a thread.
    pub const THREAD: u8 = 32;
    /// It is another user's.
    pub const OTHER_USER: u8 = 40;
    /// Yama's `ptrace_scope`.
    pub const YAMA: u8 = 41;
    /// It is not dumpable.
    pub const NOT_DUMPABLE: u8 = 42;
    /// It has capabilities that we lack.
    pub const CAPABILITIES: u8 = 43;
    /// It is in a user namespace in which we have no rights.
    pub const USER_NAMESPACE: u8 = 44;
    /// A security module, or something that cannot be seen.
    pub const SECURITY: u8 = 45;
    /// A seccomp filter keeps pyheap itself from tracing or reading.
    pub const OWN_SECCOMP: u8 = 46;
    /// It is not Python.
    pub const NOT_PYTHON: u8 = 50;
    /// It is a Python that is not supported.
    pub const UNSUPPORTED: u8 = 51;
    /// Its structs are laid out in an unknown way.
    pub const LAYOUT: u8 = 52;
    /// A symbol is missing.
    pub const SYMBOL: u8 = 53;
    /// Its file cannot be read.
    pub const FILE: u8 = 54;
    /// It is a thread of the kernel.
    pub const KERNEL: u8 = 55;
    /// Somebody traces it.
    pub const TRACED: u8 = 60;
    /// Another pyheap records it.
    pub const RECORDED: u8 = 61;
    /// It has hooks of another version.
    pub const OTHER_HOOKS: u8 = 62;
    /// Another reason.
    pub const OTHER: u8 = 70;
    /// It is stopped.
    pub const STOPPED: u8 = 71;
    /// It is starting up.
    pub const STARTING: u8 = 72;
    /// It is shutting down.
    pub const ENDING: u8 = 73;
    /// Seccomp.
    pub const SECCOMP: u8 = 74;
    /// A shadow stack.
    pub const SHADOW_STACK: u8 = 75;
    /// No address space is left.
    pub const ADDRESS_SPACE: u8 = 76;
    /// Its memory cgroup is full.
    pub const MEMORY: u8 = 77;
    /// Remote debugging is switched off.
    pub const DISABLED: u8 = 78;
    /// This processor.
    pub const PROCESSOR: u8 = 79;
}

fn code_of(refusal: &Refusal) -> u8 {
    match refusal {
        Refusal::NoSuchProcess { .. } => code::NO_PROCESS,
        Refusal::Ended { .. } => code::ENDED,
        Refusal::Thread { .. } => code::THREAD,
        Refusal::NotPermitted { reason, .. } => code_of_permission(*reason),
        Refusal::KernelThread { .. } => code::KERNEL,
        Refusal::Traced { .. } => code::TRACED,
        Refusal::Finalizing { .. } => code::ENDING,
        Refusal::Stopped { .. } => code::STOPPED,
        Refusal::Seccomp { .. } => code::SECCOMP,
        Refusal::ShadowStack { .. } => code::SHADOW_STACK,
        Refusal::Processor { .. } => code::PROCESSOR,
        Refusal::NoAddressSpace { .. } => code::ADDRESS_SPACE,
        Refusal::Proc { .. } => code::OTHER,
        Refusal::Python(error) => match error {
            FindError::NotPython { .. } => code::NOT_PYTHON,
            FindError::Layout { .. } => code::LAYOUT,
            FindError::Module { .. } | FindError::Overwritten { .. } => code::FILE,
            FindError::NotInitialised { .. } => code::STARTING,
            FindError::Memory { .. } | FindError::Maps { .. } => code::OTHER,
            _ => code::UNSUPPORTED,
        },
    }
}

const fn code_of_permission(reason: NoPermission) -> u8 {
    match reason {
        NoPermission::OtherUser { .. } | NoPermission::MemoryFile { .. } => code::OTHER_USER,
        NoPermission::YamaParents | NoPermission::YamaAdministrators | NoPermission::YamaNobody => code::YAMA,
        NoPermission::NotDumpable => code::NOT_DUMPABLE,
        NoPermission::Capabilities => code::CAPABILITIES,
        NoPermission::UserNamespace => code::USER_NAMESPACE,
        NoPermission::Privileges => code::SECURITY,
    }
}

/// Looks at the host and, if one is named, at a process. `may_stop`: one thread may be stopped, some microseconds, to read
/// seccomp filters.
#[must_use]
pub fn diagnose(pid: Option<i32>, may_stop: bool) -> Diagnosis {
    let mut found = Diagnosis {
        pid,
        checks: Vec::new(),
        cost: None,
    };
    let me = Process::myself().and_then(|me| me.status()).ok();
    let is_privileged = me.as_ref().is_some_and(|me| me.capeff & CAP_SYS_PTRACE != 0);
    own_seccomp(&mut found, me.as_ref());
    let Some(pid) = pid else {
        host(&mut found, me.as_ref(), is_privileged);
        return found;
    };
    match preflight::alive(pid) {
        Ok(facts) => process(&mut found, &facts, me.as_ref(), may_stop),
        Err(refusal) => found.fail("process", code_of(&refusal), refusal.to_string(), Vec::new()),
    }
    found
}

/// What matters for any process.
fn host(found: &mut Diagnosis, me: Option<&Status>, is_privileged: bool) {
    let user = me.map_or_else(|| "?".to_owned(), |me| me.euid.to_string());
    if is_privileged {
        found.ok(
            "capabilities",
            format!("pyheap runs as user {user} and has CAP_SYS_PTRACE"),
        );
    } else {
        let text =
            format!("pyheap runs as user {user} without CAP_SYS_PTRACE: only that user's processes can be recorded");
        found.warn("capabilities", text, &capability_remedies(&Place::default()));
    }
    match yama() {
        Some(3) => {
            let remedy = yama_remedies(&Place::default(), Some(3));
            found.fail("yama", code::YAMA, NoPermission::YamaNobody.to_string(), remedy);
        }
        Some(scope @ 1..) if !is_privileged => {
            let text = format!(
                "kernel.yama.ptrace_scope is {scope}: without CAP_SYS_PTRACE nothing can be recorded but children"
            );
            found.warn("yama", text, &yama_remedies(&Place::default(), None));
        }
        scope => found.ok("yama", yama_text(scope)),
    }
    memfd(found);
    let all = candidates::list();
    let able = all.iter().filter(|one| one.attachable.is_ok()).count();
    let text = format!(
        "{} Python processes are to be seen, {able} of them can be attached to",
        all.len()
    );
    if able == 0 {
        found.warn("processes", text, &["pyheap ps".to_owned()]);
    } else {
        found.ok("processes", text);
    }
}

/// All about one process.
fn process(found: &mut Diagnosis, facts: &Facts, me: Option<&Status>, may_stop: bool) {
    let pid = facts.id.pid;
    let place = Place::of(pid);
    let status = Process::new(observe::reachable(pid))
        .and_then(|process| process.status())
        .ok();
    let name = facts.printable_name();
    found.ok(
        "process",
        format!("{pid} ({name}) is there, with {} threads", facts.threads),
    );
    namespaces(found, facts, &place);
    let permission = permission(found, facts, me, status.as_ref(), &place);
    match preflight::untraced(facts) {
        Ok(()) => found.ok("tracer", "nobody traces it"),
        Err(refusal) => {
            let Some(tracer) = &facts.tracer else { return };
            let remedy = vec![format!("kill -INT {}   # or quit it where it runs", tracer.pid)];
            found.fail("tracer", code_of(&refusal), refusal.to_string(), remedy);
        }
    }
    if status.as_ref().and_then(|status| status.nonewprivs) == Some(1) {
        found.ok("no_new_privs", "set, which is no matter: pyheap executes nothing there");
    } else {
        found.ok("no_new_privs", "not set");
    }
    target_seccomp(found, facts, may_stop && permission, &place);
    memfd(found);
    state(found, facts);
    if !permission {
        found.warn(
            "interpreter",
            "cannot be seen without the right to look into the process",
            &[],
        );
        return;
    }
    match preflight::python(facts, false) {
        Ok(interpreter) => python(found, facts, interpreter),
        Err(refusal) => {
            let remedy = match &refusal {
                Refusal::Python(FindError::NotPython { python_descendants, .. }) => python_descendants
                    .iter()
                    .map(|pid| format!("pyheap doctor {pid}"))
                    .collect(),
                Refusal::Python(FindError::NotInitialised { .. }) => vec![format!("pyheap doctor {pid}   # again")],
                _ => Vec::new(),
            };
            let causes = std::iter::successors(Some(&refusal as &dyn std::error::Error), |error| error.source());
            let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
            found.fail("interpreter", code_of(&refusal), text, remedy);
        }
    }
}

/// Whether the kernel lets us: the lines of all that it asks for that, of which one fails if it does not.
fn permission(
    found: &mut Diagnosis,
    facts: &Facts,
    me: Option<&Status>,
    status: Option<&Status>,
    place: &Place,
) -> bool {
    let refusal = preflight::may_look(facts)
        .and_then(|()| preflight::may_write(facts))
        .err();
    let reason = match &refusal {
        None => None,
        Some(Refusal::NotPermitted { reason, .. }) => Some(*reason),
        Some(other) => {
            found.fail("access", code_of(other), other.to_string(), Vec::new());
            return false;
        }
    };
    let mut line = |check: &'static str, is_it: fn(NoPermission) -> bool, remedy: Vec<String>, ok: String| match reason
    {
        Some(reason) if is_it(reason) => found.fail(check, code_of_permission(reason), reason.to_string(), remedy),
        _ => found.ok(check, ok),
    };
    let (ours, theirs) = (me.map_or(0, |me| me.euid), facts.effective_uid);
    let remedy = match reason {
        Some(NoPermission::MemoryFile { .. }) => memory_file_remedies(),
        _ => capability_remedies(place),
    };
    line(
        "user",
        |reason| code_of_permission(reason) == code::OTHER_USER,
        remedy,
        format!("it runs as user {theirs}, pyheap as {ours}"),
    );
    let (ours, theirs) = (me.map_or(0, |me| me.capeff), status.map_or(0, |status| status.capeff));
    let has = if ours & CAP_SYS_PTRACE != 0 { "has" } else { "lacks" };
    line(
        "capabilities",
        |reason| reason == NoPermission::Capabilities,
        capability_remedies(place),
        format!("pyheap {has} CAP_SYS_PTRACE (CapEff {ours:016x}; the process's {theirs:016x})"),
    );
    line(
        "user namespace",
        |reason| reason == NoPermission::UserNamespace,
        capability_remedies(place),
        "no obstacle".to_owned(),
    );
    line(
        "yama",
        |reason| code_of_permission(reason) == code::YAMA,
        yama_remedies(place, yama()),
        yama_text(yama()),
    );
    line(
        "dumpable",
        |reason| reason == NoPermission::NotDumpable,
        capability_remedies(place),
        "no obstacle".to_owned(),
    );
    let labels = label("self").zip(label(&facts.id.pid.to_string()));
    let text = labels.as_ref().map_or_else(
        || "no security module labels processes here".to_owned(),
        |(ours, theirs)| format!("it is labelled {theirs}, pyheap {ours}"),
    );
    let remedy = vec![
        "journalctl -k | grep -i denied   # which profile, and why".to_owned(),
        "docker run --security-opt apparmor=unconfined --cap-add=SYS_PTRACE …   # for pyheap's own container"
            .to_owned(),
    ];
    line(
        "security module",
        |reason| reason == NoPermission::Privileges,
        remedy,
        text,
    );
    if refusal.is_none() {
        found.ok("access", "a byte of its memory could be read");
    }
    refusal.is_none()
}

/// The label that a security module has given a process.
fn label(of: &str) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{of}/attr/current")).ok()?;
    let text = String::from_utf8_lossy(bytes.get(..bytes.len().min(MAX_LABEL_BYTES))?).into_owned();
    let text = text.trim_end_matches(['\0', '\n']);
    let clean: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    (!clean.is_empty()).then_some(clean)
}

fn namespaces(found: &mut Diagnosis, facts: &Facts, place: &Place) {
    let pid = facts.id.pid;
    let mut other = Vec::new();
    let mut unseen = false;
    for name in ["user", "pid", "mnt", "net"] {
        let link = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/{name}")).ok();
        match (link("self"), link(&pid.to_string())) {
            (Some(ours), Some(theirs)) if ours != theirs => other.push(name),
            (_, None) => unseen = true,
            _ => {}
        }
    }
    let inside = facts.namespace_pids.last().filter(|inside| **inside != pid);
    let inside = inside.map_or_else(String::new, |inside| format!("; its pid in there is {inside}"));
    let place = match place.short().as_str() {
        "-" => String::new(),
        place => format!("; it lives in {place}"),
    };
    let text = match (other.as_slice(), unseen) {
        ([], true) => "cannot be seen without rights".to_owned(),
        ([], false) => "it has the same namespaces as pyheap".to_owned(),
        (other, _) => format!("it has its own {} namespaces, which is no obstacle", other.join(", ")),
    };
    found.ok("namespaces", format!("{text}{inside}{place}"));
}

/// Whether seccomp lets pyheap itself trace and read, asked without a target: a call that cannot succeed says why.
fn own_seccomp(found: &mut Diagnosis, me: Option<&Status>) {
    let mode = me.and_then(|me| me.seccomp).unwrap_or(0);
    let answer = nix::sys::ptrace::interrupt(nix::unistd::Pid::from_raw(0));
    let remedies = || {
        vec![
            "docker run --cap-add=SYS_PTRACE …   # its seccomp profile then allows ptrace, also before Linux 4.8"
                .to_owned(),
            "docker run --security-opt seccomp=unconfined …".to_owned(),
            "kubectl debug -it POD --image=IMAGE --target=CONTAINER --profile=general".to_owned(),
        ]
    };
    match (mode, answer) {
        (0, _) => found.ok("own seccomp", "no filter keeps pyheap from tracing"),
        (_, Err(nix::errno::Errno::ESRCH)) => found.ok("own seccomp", "pyheap is under a filter, which lets it trace"),
        (_, _) => {
            let text = "a seccomp filter keeps pyheap itself from tracing";
            found.fail("own seccomp", code::OWN_SECCOMP, text, remedies());
        }
    }
}

fn target_seccomp(found: &mut Diagnosis, facts: &Facts, may_stop: bool, place: &Place) {
    let pid = facts.id.pid;
    let fail = |found: &mut Diagnosis, why: Forbidden| {
        let text = Refusal::Seccomp { pid, why }.to_string();
        let mut remedy =
            vec!["docker run --security-opt seccomp=unconfined …   # for the process, at its next start".to_owned()];
        if place.pod_uid.is_some() {
            remedy = vec!["securityContext: {seccompProfile: {type: RuntimeDefault}}   # of its container".to_owned()];
        }
        found.fail("seccomp", code::SECCOMP, text, remedy);
    };
    if facts.kinds.iter().any(|kind| kind.seccomp == 1) {
        return fail(found, Forbidden::Strict);
    }
    let filters = facts
        .kinds
        .iter()
        .filter(|kind| kind.seccomp == 2)
        .map(|kind| kind.filters)
        .max();
    match filters {
        None => found.ok("seccomp", "no filter"),
        Some(count) if may_stop => match seccomp::check_kinds(pid, &facts.kinds, seccomp::Purpose::Infect) {
            Ok(()) => found.ok("seccomp", format!("{count} filters, which let the hooks in")),
            Err(why) => fail(found, why),
        },
        Some(count) => found.warn(
            "seccomp",
            format!(
                "{count} filters; whether they let the hooks in is only seen by stopping a thread for some microseconds"
            ),
            &[format!("pyheap doctor {pid} --read-filters")],
        ),
    }
}

fn memfd(found: &mut Diagnosis) {
    let value = std::fs::read_to_string("/proc/sys/vm/memfd_noexec").unwrap_or_default();
    let text = match value.trim() {
        "" | "0" => "not restricted".to_owned(),
        value => format!("vm.memfd_noexec is {value}, which is no matter: pyheap makes no memfd"),
    };
    found.ok("memfd_noexec", text);
}

/// The state of its threads, and room for the hooks.
fn state(found: &mut Diagnosis, facts: &Facts) {
    let pid = facts.id.pid;
    let failed: Vec<Refusal> = preflight::STATE_CHECKS
        .iter()
        .filter_map(|check| check(facts).err())
        .collect();
    for refusal in &failed {
        let remedy = match refusal {
            Refusal::Stopped { .. } => vec![format!("kill -CONT {pid}")],
            Refusal::ShadowStack { .. } => vec!["GLIBC_TUNABLES=glibc.cpu.x86_shstk=off python …".to_owned()],
            Refusal::NoAddressSpace { .. } => vec![format!("prlimit --pid {pid} --as=unlimited")],
            _ => vec![format!("pyheap dump {pid}")],
        };
        found.fail("state", code_of(refusal), refusal.to_string(), remedy);
    }
    if failed.is_empty() {
        match facts.state {
            'D' => found.warn(
                "state",
                "its main thread waits uninterruptibly (a disk, a network file system, vfork): another one will be taken, if there is one",
                &[],
            ),
            state => found.ok("state", format!("runs (state {state}), with room for the hooks")),
        }
    }
    if facts.threads > MANY_THREADS {
        let text = format!(
            "{} threads: each is looked at when pyheap comes and goes, which takes a while",
            facts.threads
        );
        found.warn("threads", text, &[]);
    }
    match headroom::of(pid).filter(|left| *left < NO_LIMIT) {
        None => found.ok("memory", "no limit of a memory cgroup is to be seen"),
        Some(left) => {
            let text = format!("its memory cgroup has {} left", bytes(left as f64));
            match session::fitting(pid, Sizes::default()) {
                Err(error) => found.fail("memory", code::MEMORY, error.to_string(), memory_remedies()),
                Ok(sizes) if sizes == Sizes::default() => found.ok("memory", text),
                Ok(_) => found.warn(
                    "memory",
                    format!("{text}: the tables will be small, of 2 MiB"),
                    &memory_remedies(),
                ),
            }
        }
    }
}

fn memory_file_remedies() -> Vec<String> {
    vec![
        "docker run --cap-add=SYS_PTRACE --cap-add=DAC_OVERRIDE …   # both".to_owned(),
        "securityContext: {capabilities: {add: [SYS_PTRACE, DAC_OVERRIDE]}}   # of pyheap's container".to_owned(),
        "sudo setcap cap_sys_ptrace,cap_dac_override+ep \"$(command -v pyheap)\"".to_owned(),
    ]
}

fn memory_remedies() -> Vec<String> {
    vec![
        "systemctl set-property --runtime UNIT MemoryMax=…".to_owned(),
        "docker update --memory=… --memory-swap=… CONTAINER".to_owned(),
        "kubectl patch pod POD --subresource=resize …   # limits.memory".to_owned(),
    ]
}

/// The interpreter, and what is in it.
fn python(found: &mut Diagnosis, facts: &Facts, interpreter: Interpreter) {
    let pid = facts.id.pid;
    let path = super::process::printable(&interpreter.path);
    found.ok("interpreter", format!("CPython {}, {path}", interpreter.description()));
    found.ok("offsets", format!("known from {}", interpreter.offset_source));
    let target = Target {
        facts: facts.clone(),
        interpreter,
    };
    match session::entries(&target) {
        Ok(_) => found.ok("symbols", "all that pyheap needs was found"),
        Err(error) => found.fail("symbols", code::SYMBOL, error.to_string(), Vec::new()),
    }
    match session::allowed(&target) {
        Ok(()) => found.ok("remote debugging", "not switched off"),
        Err(error) => {
            let remedy = vec![format!("pyheap record {pid} --even-if-remote-debug-disabled")];
            found.fail("remote debugging", code::DISABLED, error.to_string(), remedy);
        }
    }
    hooks(found, pid);
    if found.exit_code() == 0 {
        found.cost = Some(cost(pid));
    }
}

/// What of pyheap is in the process already.
fn hooks(found: &mut Diagnosis, pid: i32) {
    let mut nothing = true;
    for region in session::regions(pid) {
        nothing = false;
        let Found::Region(identity) = region else {
            found.ok(
                "hooks",
                "a killed pyheap has left memory, which the next recording takes out",
            );
            continue;
        };
        if let Some(owner) = session::user_of(pid, &identity) {
            let text = AttachError::Recorded { pid, owner }.to_string();
            found.fail("hooks", code::RECORDED, text, vec![format!("kill -INT {owner}")]);
        } else if identity.protocol < pyheap_protocol::OLDEST_CURABLE {
            let protocol = identity.protocol;
            let text = AttachError::OtherProtocol { pid, protocol }.to_string();
            found.fail("hooks", code::OTHER_HOOKS, text, Vec::new());
        } else {
            let text = "inert hooks of an earlier pyheap are in it, which the next recording takes out".to_owned();
            found.warn("hooks", text, &[format!("pyheap cure {pid}")]);
        }
    }
    if nothing {
        found.ok("hooks", "nothing of pyheap is in it");
    }
}

/// What an attach would cost.
fn cost(pid: i32) -> Cost {
    let sizes = session::fitting(pid, Sizes::default()).unwrap_or_default();
    let most = session::region_bytes_of(sizes);
    let rss = MemoryUse::of(pid).map_or(0, |memory| memory.rss_bytes);
    Cost {
        stop_micros: STOP_MICROS.0,
        stop_micros_busy: STOP_MICROS.1,
        address_space_bytes: most,
        // 64 bytes for a live sample, of which there is one in 128 KiB at most; the ring; and the pages of stacks and code.
        memory_bytes_at_most: most
            .min((rss / session::DEFAULT_PERIOD * 64).saturating_add(sizes.ring_bytes + (2 << 20))),
        cpu_share_at_most: 0.01,
    }
}

fn yama() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    text.trim().parse().ok()
}

fn yama_text(scope: Option<u32>) -> String {
    scope.map_or_else(
        || "this kernel has no Yama".to_owned(),
        |scope| format!("kernel.yama.ptrace_scope is {scope}, no obstacle"),
    )
}

fn yama_remedies(place: &Place, scope: Option<u32>) -> Vec<String> {
    if scope == Some(3) {
        return vec![
            "echo kernel.yama.ptrace_scope=1 >/etc/sysctl.d/10-ptrace.conf   # and boot: a 3 stays until then"
                .to_owned(),
        ];
    }
    let mut words = vec!["sysctl -w kernel.yama.ptrace_scope=0   # for everybody, until the next boot".to_owned()];
    words.extend(capability_remedies(place));
    words
}

/// How pyheap gets the capability, for where the process lives.
fn capability_remedies(place: &Place) -> Vec<String> {
    let kubernetes = || {
        let pod = place.pod.as_deref().unwrap_or("POD");
        format!(
            "kubectl debug -it {pod} --image=IMAGE --target=CONTAINER --profile=general   # IMAGE has pyheap; as root"
        )
    };
    let docker = || {
        let container = place.container.as_deref().unwrap_or("CONTAINER");
        format!(
            "docker run --rm -it --pid=container:{container} --cap-add=SYS_PTRACE IMAGE pyheap …   # IMAGE has pyheap"
        )
    };
    let mut words = vec![
        "sudo pyheap …".to_owned(),
        "sudo setcap cap_sys_ptrace+ep \"$(command -v pyheap)\"   # once, then without sudo".to_owned(),
    ];
    match (&place.pod_uid, &place.container) {
        (Some(_), _) => words.insert(0, kubernetes()),
        (None, Some(_)) => words.insert(0, docker()),
        (None, None) => words.extend([docker(), kubernetes()]),
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::PyVersion;

    /// The causes that not every machine can have, and that a code's first digit is the exit code of a recording.
    #[test]
    fn codes_begin_with_the_exit_code_of_a_recording() {
        let pid = 4242;
        let permission = |reason| Refusal::NotPermitted { pid, reason };
        let version = PyVersion::from_hex(0x030c_00f0);
        let name = String::new;
        let all = [
            (Refusal::NoSuchProcess { pid }, code::NO_PROCESS),
            (Refusal::Thread { tid: pid, pid }, code::THREAD),
            (permission(NoPermission::OtherUser { owner: 7 }), code::OTHER_USER),
            (permission(NoPermission::MemoryFile { owner: 7 }), code::OTHER_USER),
            (permission(NoPermission::YamaParents), code::YAMA),
            (permission(NoPermission::YamaAdministrators), code::YAMA),
            (permission(NoPermission::YamaNobody), code::YAMA),
            (permission(NoPermission::NotDumpable), code::NOT_DUMPABLE),
            (permission(NoPermission::Capabilities), code::CAPABILITIES),
            (permission(NoPermission::UserNamespace), code::USER_NAMESPACE),
            (permission(NoPermission::Privileges), code::SECURITY),
            (Refusal::KernelThread { pid, name: name() }, code::KERNEL),
            (FindError::NotInitialised { pid, version }.into(), code::STARTING),
            (Refusal::Finalizing { pid }, code::ENDING),
            (Refusal::Stopped { pid }, code::STOPPED),
            (Refusal::ShadowStack { pid }, code::SHADOW_STACK),
            (Refusal::Processor { pid }, code::PROCESSOR),
            (
                Refusal::NoAddressSpace {
                    pid,
                    left: 0,
                    needed: 1,
                },
                code::ADDRESS_SPACE,
            ),
        ];
        for (refusal, wanted) in all {
            assert_eq!(code_of(&refusal), wanted, "{refusal}");
            assert_eq!(wanted / 10, refusal.exit_code(), "{refusal}");
        }
        let attach = [
            (AttachError::Recorded { pid, owner: 7 }.exit_code(), code::RECORDED),
            (
                AttachError::OtherProtocol { pid, protocol: 1 }.exit_code(),
                code::OTHER_HOOKS,
            ),
            (AttachError::NoSymbol { pid, symbol: "x" }.exit_code(), code::SYMBOL),
            (AttachError::NoMemory { pid, left: 1 }.exit_code(), code::MEMORY),
            (AttachError::Disabled { pid }.exit_code(), code::DISABLED),
        ];
        for (code, wanted) in attach {
            assert_eq!(wanted / 10, code);
        }
    }
}
