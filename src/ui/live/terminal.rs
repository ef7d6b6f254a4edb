//! The terminal: taken over, and given back whatever happens.
//!
//! * Writes never block for long: a terminal behind a dead connection must not keep the hooks in the target.
//! * Keys come from a thread of their own: the reader spins when the terminal has gone, and nobody waits for it.

use crate::threads;
use crossbeam_channel::{Receiver, bounded};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, raise};
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::crossterm::{cursor, execute};
use ratatui::layout::{Position, Rect};
use ratatui::{Frame, Terminal as Tui, TerminalOptions, Viewport, backend::CrosstermBackend};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A terminal that takes nothing for so long gets no picture until it does.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often is looked whether to stop, while it takes nothing.
const LOOK: u16 = 50;
/// Keys that may wait.
const QUEUE: usize = 64;
/// Off the other screen, cursor visible, no attributes.
const GIVE_BACK: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// Whether the terminal is ours at present.
static IS_OURS: AtomicBool = AtomicBool::new(false);
/// What threads said in their panics meanwhile.
static LAST_WORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Buffers what is written until it is flushed, and then does not wait forever.
#[derive(Debug)]
pub struct Patient {
    /// Of our own, so that it can be non-blocking; `None` if that could not be had.
    tty: Option<File>,
    buffer: Vec<u8>,
    stop: Arc<AtomicBool>,
}

impl Patient {
    fn new(stop: &Arc<AtomicBool>) -> Self {
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let tty = OpenOptions::new()
            .write(true)
            .custom_flags(flags.bits())
            .open("/proc/self/fd/1")
            .ok();
        Self {
            tty,
            buffer: Vec::new(),
            stop: Arc::clone(stop),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        let Some(tty) = &mut self.tty else {
            let mut stdout = io::stdout().lock();
            return stdout.write_all(&self.buffer).and_then(|()| stdout.flush());
        };
        let begun = Instant::now();
        let mut rest = &self.buffer[..];
        while !rest.is_empty() {
            match tty.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if begun.elapsed() >= PATIENCE || self.stop.load(Ordering::Acquire) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    let mut wait = [PollFd::new(tty.as_fd(), PollFlags::POLLOUT)];
                    let _ = poll(&mut wait, PollTimeout::from(LOOK));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let done = self.send();
        self.buffer.clear();
        done
    }
}

/// The terminal, while it is ours. Dropping gives it back.
pub struct Terminal {
    tui: Tui<CrosstermBackend<Patient>>,
    keys: Receiver<Event>,
    continued: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    /// What is drawn on.
    area: Rect,
    /// Whether the terminal has missed something.
    is_stale: bool,
}

impl Terminal {
    /// Takes the terminal over. `stop` ends waits for it.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn open(stop: &Arc<AtomicBool>) -> io::Result<Self> {
        let continued = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(libc::SIGCONT, Arc::clone(&continued))?;
        let mut tui = new_tui(stop, Rect::default())?;
        give_back_in_panics();
        take(tui.backend_mut())?;
        let (send, keys) = bounded(QUEUE);
        threads::start("keys", move || {
            while let Ok(event) = event::read() {
                if send.send(event).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self {
            tui,
            keys,
            continued,
            stop: Arc::clone(stop),
            area: Rect::default(),
            is_stale: true,
        })
    }

    /// Keys and changes of size, as they come; disconnected when no more will.
    #[must_use]
    pub fn keys(&self) -> &Receiver<Event> {
        &self.keys
    }

    /// Whether nobody can see it any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let stdout = io::stdout();
        let mut ask = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        matches!(poll(&mut ask, PollTimeout::ZERO), Ok(1..))
            && ask[0].revents().is_some_and(|found| found.intersects(gone))
    }

    /// Draws; what a terminal that does not listen has missed it gets later.
    ///
    /// # Errors
    /// When there is no terminal any more.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        if !IS_OURS.load(Ordering::Acquire) {
            // We were stopped, and have not taken it over again.
            return Ok(());
        }
        match self.try_draw(draw) {
            Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                self.is_stale = true;
                Ok(())
            }
            other => other,
        }
    }

    /// ratatui's own way to clear the screen, also when its size has changed, asks the terminal where its cursor is and waits
    /// for the answer among the keys, which the other thread takes. So its size is told it, and whatever needs a clear
    /// screen gets a new one.
    fn try_draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let area = Rect::from((Position::ORIGIN, self.tui.size()?));
        if std::mem::take(&mut self.is_stale) || area != self.area {
            self.area = area;
            self.tui = new_tui(&self.stop, area)?;
            execute!(self.tui.backend_mut(), Clear(ClearType::All))?;
        }
        self.tui.draw(draw).map(|_| ())
    }

    /// Draws everything anew next time.
    pub fn redraw(&mut self) {
        self.is_stale = true;
    }

    /// Whether we were stopped and go on. Takes the terminal over again: whoever used it meanwhile has changed it.
    pub fn has_continued(&mut self) -> bool {
        if !self.continued.swap(false, Ordering::AcqRel) {
            return false;
        }
        let _ = disable_raw_mode();
        let _ = take(self.tui.backend_mut());
        self.is_stale = true;
        true
    }

    /// Ctrl-Z: gives the terminal back, says `why`, stops until somebody continues us.
    pub fn suspend(&mut self, why: &str) {
        give_back();
        crate::ui::output::note(why);
        // Where nobody could continue us (no job control) the kernel does not stop us.
        let _ = raise(Signal::SIGTSTP);
        self.continued.store(true, Ordering::Release);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
        let words = std::mem::take(&mut *LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner));
        words.iter().for_each(|words| crate::ui::output::note(words));
    }
}

/// A screen of this size that is taken for empty.
fn new_tui(stop: &Arc<AtomicBool>, area: Rect) -> io::Result<Tui<CrosstermBackend<Patient>>> {
    let backend = CrosstermBackend::new(Patient::new(stop));
    let viewport = Viewport::Fixed(area);
    Tui::with_options(backend, TerminalOptions { viewport })
}

fn take(backend: &mut CrosstermBackend<Patient>) -> io::Result<()> {
    enable_raw_mode()?;
    IS_OURS.store(true, Ordering::Release);
    execute!(backend, EnterAlternateScreen, cursor::Hide)
}

/// Gives the terminal back if it is ours. Waits for it only as long as [`Patient`] does.
fn give_back() {
    if !IS_OURS.swap(false, Ordering::AcqRel) {
        return;
    }
    let mut out = Patient::new(&Arc::default());
    let _ = out.write_all(GIVE_BACK).and_then(|()| out.flush());
    let _ = disable_raw_mode();
}

/// A panic of this thread gives the terminal back before it is shown; one of another is shown later.
fn give_back_in_panics() {
    let ours = std::thread::current().id();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == ours {
            give_back();
        }
        if IS_OURS.load(Ordering::Acquire) {
            let mut words = LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner);
            words.push(info.to_string());
        } else {
            before(info);
        }
    }));
}
