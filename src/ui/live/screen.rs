//! The full-screen view: a recording's front that draws and obeys keys.

use super::lock;
use super::rows::{Line, Lines, lines};
use super::source::Sources;
use super::state::{Command, State};
use super::survivors::{complete, survivors};
use super::terminal::Terminal;
use super::view::{Header, View, draw};
use super::watch::{Picture, Watch};
use crate::collect::live::Live;
use crate::collect::recorder::{Saved, losses};
use crate::collect::resolve;
use crate::profile::names::{ProfileNames, SuffixStyle};
use crate::report::info::describe_losses;
use crate::report::leaks::Report;
use crate::report::types::TypeRow;
use crate::ui::cli::recording::{Front, Recording, facts};
use crossbeam_channel::{RecvTimeoutError, TryRecvError};
use ratatui::crossterm::event::{Event, KeyEventKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A verdict costs time: this part of it at most; and so do the types of the survivors.
const SHARE: u32 = 400;
/// And it is not looked for more often than this.
const VERDICT_PAUSE: Duration = Duration::from_secs(2);
/// And so does a new picture of very many stacks.
const PICTURE_SHARE: u32 = 200;
/// What was said is shown for so long.
const MESSAGE: Duration = Duration::from_secs(8);

/// When it is time for a verdict.
#[derive(Debug, Default)]
pub struct Judge {
    next: Duration,
    /// The last one.
    pub report: Option<Report>,
}

impl Judge {
    /// Judges if it is time to; `live` is what is alive.
    pub fn look(&mut self, watch: &Mutex<Watch>, live: &Mutex<Live>, at: Duration) {
        if at >= self.next {
            let begun = Instant::now();
            let mut report = lock(watch).judge(at);
            complete(&mut report, watch, live, at);
            self.report = Some(report);
            let pause = begun.elapsed().saturating_mul(SHARE).max(VERDICT_PAUSE);
            self.next = at + pause;
        }
    }
}

/// The types of the selected line's survivors.
#[derive(Debug, Default)]
struct Kinds {
    /// The line.
    key: Option<u64>,
    rows: Vec<TypeRow>,
    /// They are of a later time than the rest of the picture, which stands still.
    is_later: bool,
    next: Option<Instant>,
}

impl Kinds {
    /// Looks at those of `line`, if it is another or `is_new` says that there are new numbers, as often as that may cost time.
    fn look(&mut self, line: Option<&Line>, is_new: bool, watch: &Mutex<Watch>, live: &Mutex<Live>) {
        let key = line.map(|line| line.key);
        let is_other = key != self.key;
        if is_other {
            self.key = key;
            self.rows.clear();
        }
        let begun = Instant::now();
        let is_missing = is_other || self.rows.is_empty();
        let Some(line) = line.filter(|_| (is_new || is_missing) && self.next.is_none_or(|next| begun >= next)) else {
            return;
        };
        if let Some([found]) = survivors(watch, live, &[&line.stacks], false).as_deref_mut() {
            self.rows = std::mem::take(&mut found.types);
            self.is_later = !is_new;
        }
        self.next = Some(begun + begun.elapsed().saturating_mul(SHARE));
    }
}

/// The view.
pub struct Screen {
    terminal: Terminal,
    watch: Arc<Mutex<Watch>>,
    header: Header,
    state: State,
    picture: Picture,
    lines: Lines,
    kinds: Kinds,
    judge: Judge,
    sources: Option<Sources>,
    /// Allocator domains that are recorded, for the facts of a save.
    domains: u8,
    interval: Duration,
    next: Duration,
    waiting: Option<Event>,
    said: Option<Instant>,
    has_colour: bool,
    is_dirty: bool,
    /// Whether there is nobody to draw for.
    is_over: bool,
}

impl Screen {
    /// Over `terminal`, which shows something at once.
    #[must_use]
    pub fn new(terminal: Terminal, watch: Arc<Mutex<Watch>>, header: Header, domains: u8, interval: Duration) -> Self {
        Self {
            sources: None,
            terminal,
            watch,
            state: State {
                offered_name: offered_name(&header),
                ..State::default()
            },
            header,
            picture: Picture::default(),
            lines: Lines::default(),
            kinds: Kinds::default(),
            judge: Judge::default(),
            domains,
            interval,
            next: Duration::ZERO,
            waiting: None,
            said: None,
            has_colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            is_dirty: true,
            is_over: false,
        }
    }

    /// Shows source lines, too.
    pub fn show_sources(&mut self, sources: Sources) {
        self.sources = Some(sources);
    }

    /// The last verdict.
    #[must_use]
    pub fn report(self) -> Option<Report> {
        self.judge.report
    }

    fn say(&mut self, text: String) {
        self.state.message = text;
        self.said = Some(Instant::now());
        self.is_dirty = true;
    }

    /// Takes the numbers as they are now.
    fn refresh(&mut self, at: Duration) {
        if !self.state.is_paused {
            self.picture = lock(&self.watch).picture(at);
        }
        self.state.has_baseline = self.picture.baseline.is_some();
        self.state.has_threads = self.picture.stacks.iter().any(|stack| stack.thread.is_some());
        self.arrange();
    }

    fn arrange(&mut self) {
        self.lines = lines(&self.picture, &self.state.choice, &lock(&self.watch));
        self.is_dirty = true;
    }

    fn show(&mut self, live: &Mutex<Live>) {
        let place = self.state.place(&self.lines.lines);
        let selected = self.lines.lines.get(place);
        let past = selected.map_or_else(Vec::new, |line| lock(&self.watch).past(&line.stacks, self.picture.at));
        self.kinds.look(selected, !self.state.is_paused, &self.watch, live);
        let sources = self.sources.as_ref();
        let view = View {
            header: &self.header,
            picture: &self.picture,
            lines: &self.lines,
            place,
            past: &past,
            types: &self.kinds.rows,
            are_types_later: self.kinds.is_later,
            report: self.judge.report.as_ref(),
            source: &|frame| sources.and_then(|sources| sources.line(frame)),
            has_colour: self.has_colour,
        };
        let state = &mut self.state;
        if self.terminal.draw(|frame| draw(frame, &view, state)).is_err() {
            self.is_over = true;
        }
        self.is_dirty = false;
    }

    fn event(&mut self, event: Event, recording: &mut Recording) {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                // A key answers what was said.
                self.state.message.clear();
                self.said = None;
                let was_paused = self.state.is_paused;
                let command = self.state.key(key, &self.lines.lines);
                if let Some(command) = command {
                    self.obey(command, recording);
                }
                if !self.state.message.is_empty() {
                    self.said = Some(Instant::now());
                }
                if was_paused && !self.state.is_paused {
                    self.refresh(recording.recorder.elapsed());
                }
                self.arrange();
            }
            Event::Resize(..) => self.is_dirty = true,
            _ => {}
        }
    }

    fn obey(&mut self, command: Command, recording: &mut Recording) {
        let at = recording.recorder.elapsed();
        match command {
            Command::Quit => self.is_over = true,
            Command::Redraw => self.terminal.redraw(),
            Command::Suspend => {
                let pid = self.header.pid;
                self.terminal.suspend(&format!(
                    "pyheap is suspended; its hooks are still in PID {pid}. `fg` goes on, `kill %%` and `fg` end and detach"
                ));
            }
            Command::SetBaseline => {
                self.state.is_paused = false;
                lock(&self.watch).set_baseline(at);
                self.refresh(at);
                self.say("baseline set: from now on the change since then is shown; B ends that".to_owned());
            }
            Command::ClearBaseline => {
                lock(&self.watch).clear_baseline();
                self.refresh(at);
            }
            Command::Save(name) => self.save(name.trim(), recording),
            Command::EndSave => {
                recording.recorder.end_save();
                self.state.is_saving = false;
            }
        }
    }

    fn save(&mut self, name: &str, recording: &mut Recording) {
        let base = PathBuf::from(name);
        match taken(&base) {
            Some(path) => self.say(format!("not saved: {} exists; choose another name", path.display())),
            None => {
                let mut facts = facts(&recording.session, self.domains);
                let before = recording.recorder.elapsed().as_secs_f64();
                facts.more.insert("attached_seconds_before".to_owned(), before.into());
                recording.recorder.save(base, facts);
                self.state.is_saving = true;
            }
        }
    }

    /// What has become of the files.
    fn look_at_saved(&mut self, recording: &Recording) {
        let saving = match recording.recorder.saved() {
            Saved::Nothing => String::new(),
            Saved::Now(names) => format!("saving into {} (s ends)", names.base().display()),
            Saved::Done(names) => format!("saved {}", names.base().display()),
            Saved::Failed(why) => {
                self.state.is_saving = false;
                format!("not saved: {why}")
            }
        };
        if saving != self.header.saving {
            self.header.saving = saving;
            self.state.offered_name = offered_name(&self.header);
            self.is_dirty = true;
        }
    }
}

/// `pyheap-4242-20291231-235959`, which is free.
fn offered_name(header: &Header) -> String {
    let number = (1..10_000).find(|number| taken(Path::new(&name(header, *number))).is_none());
    name(header, number.unwrap_or(1))
}

fn name(header: &Header, number: u32) -> String {
    format!("pyheap-{}-{number}", header.pid)
}

/// A file that a save under this filebase would overwrite.
fn taken(base: &Path) -> Option<PathBuf> {
    use crate::profile::names::Part;
    let names = ProfileNames::new(base, SuffixStyle::default());
    let mut paths = Part::ALL.into_iter().map(|part| names.path(part));
    paths.find(|path| path.symlink_metadata().is_ok())
}

impl Front for Screen {
    fn note(&mut self, text: &str) {
        self.say(text.to_owned());
    }

    fn second(&mut self, recording: &mut Recording) {
        let recorder = &recording.recorder;
        let at = recorder.elapsed();
        if let Some(memory) = recorder.memory() {
            self.header.rss = memory.rss;
        }
        lock(&self.watch).tick(at, recorder.memory());
        self.judge.look(&self.watch, &recorder.live, at);
        let losses = losses(&recorder.counters(), &resolve::lock(&recorder.live));
        self.header.losses = if losses.is_empty() {
            String::new()
        } else {
            describe_losses(&losses)
        };
    }

    fn turn(&mut self, recording: &mut Recording) -> bool {
        if self.terminal.has_continued() {
            self.say("continued; what did not fit into the buffer meanwhile was lost, and is counted".to_owned());
        }
        if let Some(event) = self.waiting.take() {
            self.event(event, recording);
        }
        loop {
            match self.terminal.keys().try_recv() {
                Ok(event) if !self.is_over => self.event(event, recording),
                Ok(_) | Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.is_over = true;
                    break;
                }
            }
        }
        self.look_at_saved(recording);
        if self.said.is_some_and(|said| said.elapsed() > MESSAGE) {
            self.said = None;
            self.state.message.clear();
            self.is_dirty = true;
        }
        let at = recording.recorder.elapsed();
        if at >= self.next {
            let begun = Instant::now();
            self.refresh(at);
            self.next = at + self.interval.max(begun.elapsed() * PICTURE_SHARE);
        }
        self.is_over |= self.terminal.is_gone();
        if self.is_dirty && !self.is_over {
            self.show(&recording.recorder.live);
        }
        self.is_over
    }

    fn pause(&mut self, time: Duration) {
        match self.terminal.keys().recv_timeout(time) {
            Ok(event) => self.waiting = Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.is_over = true,
        }
    }
}
