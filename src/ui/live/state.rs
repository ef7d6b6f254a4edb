//! What the user has done: keys become choices and commands. No terminal, no process.

use super::rows::{Choice, Column, Group, Line};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Characters of a text that is typed, at most.
const MAX_TYPED: usize = 200;
/// Rows that Page Up and Page Down go.
const PAGE: usize = 10;

/// What keys are for at present.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Mode {
    /// The table.
    #[default]
    Table,
    /// The filter is being typed; this was it before.
    Filter(String),
    /// The filebase of a save is being typed.
    Save(String),
    /// Help is shown.
    Help,
    /// The verdict is shown in full.
    Verdict,
}

/// What keys ask for that is not only a matter of what is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// End, detach.
    Quit,
    /// Ctrl-Z.
    Suspend,
    /// Draw everything anew.
    Redraw,
    /// Set the baseline to now.
    SetBaseline,
    /// Take it away.
    ClearBaseline,
    /// Write files under this filebase from now on.
    Save(String),
    /// End these files.
    EndSave,
}

/// The state of the view.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// What is shown, and in which order.
    pub choice: Choice,
    /// What keys are for.
    pub mode: Mode,
    /// The line that is selected, by its key; else the first.
    pub selected: Option<u64>,
    /// Where it was when it was last seen.
    pub cursor: usize,
    /// The first line that is shown, of the table or of a page of text.
    pub top: usize,
    /// Whether what is shown stands still.
    pub is_paused: bool,
    /// Whether there is a baseline.
    pub has_baseline: bool,
    /// Whether files are being written.
    pub is_saving: bool,
    /// Whether threads are known to group by.
    pub has_threads: bool,
    /// The filebase that a save is offered.
    pub offered_name: String,
    /// What was said last.
    pub message: String,
}

impl State {
    /// The place of the selected line.
    pub fn place(&mut self, lines: &[Line]) -> usize {
        let found = self
            .selected
            .and_then(|key| lines.iter().position(|line| line.key == key));
        let place = match found {
            Some(place) => place,
            None if self.selected.is_some() => self.cursor.min(lines.len().saturating_sub(1)),
            None => 0,
        };
        self.cursor = place;
        place
    }

    /// Takes a key.
    pub fn key(&mut self, key: KeyEvent, lines: &[Line]) -> Option<Command> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c' | 'd') => return Some(Command::Quit),
                KeyCode::Char('z') => return Some(Command::Suspend),
                KeyCode::Char('l') => return Some(Command::Redraw),
                KeyCode::Char('u') => {
                    self.typed(|text| text.clear());
                    return None;
                }
                _ => return None,
            }
        }
        match &self.mode {
            Mode::Filter(_) | Mode::Save(_) => self.typing(key.code),
            Mode::Help | Mode::Verdict => {
                self.reading(key.code);
                None
            }
            Mode::Table => self.table(key.code, lines),
        }
    }

    fn typed(&mut self, change: impl FnOnce(&mut String)) {
        match &mut self.mode {
            Mode::Filter(_) => change(&mut self.choice.filter),
            Mode::Save(name) => change(name),
            _ => {}
        }
    }

    fn typing(&mut self, code: KeyCode) -> Option<Command> {
        match code {
            KeyCode::Char(c) => self.typed(|text| {
                if text.chars().count() < MAX_TYPED && !c.is_control() {
                    text.push(c);
                }
            }),
            KeyCode::Backspace => self.typed(|text| {
                text.pop();
            }),
            KeyCode::Esc => {
                if let Mode::Filter(before) = std::mem::take(&mut self.mode) {
                    self.choice.filter = before;
                }
            }
            KeyCode::Enter => {
                if let Mode::Save(name) = std::mem::take(&mut self.mode)
                    && !name.trim().is_empty()
                {
                    return Some(Command::Save(name));
                }
            }
            _ => {}
        }
        None
    }

    /// A page of text.
    fn reading(&mut self, code: KeyCode) {
        match code {
            KeyCode::Down | KeyCode::Char('j') => self.top += 1,
            KeyCode::Up | KeyCode::Char('k') => self.top = self.top.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.top += PAGE,
            KeyCode::PageUp => self.top = self.top.saturating_sub(PAGE),
            KeyCode::Home => self.top = 0,
            _ => self.show(Mode::Table),
        }
    }

    fn show(&mut self, mode: Mode) {
        self.mode = mode;
        self.top = 0;
    }

    fn table(&mut self, code: KeyCode, lines: &[Line]) -> Option<Command> {
        let place = self.place(lines);
        // Who asks for another order wants to see what is first in it.
        if let KeyCode::Char('o' | '>' | '<' | '1'..='5' | 'r' | 'b' | 'B') = code {
            self.selected = None;
        }
        let choice = &mut self.choice;
        match code {
            KeyCode::Char('q') => return Some(Command::Quit),
            KeyCode::Down | KeyCode::Char('j') => self.select(place + 1, lines),
            KeyCode::Up | KeyCode::Char('k') => self.select(place.saturating_sub(1), lines),
            KeyCode::PageDown => self.select(place + PAGE, lines),
            KeyCode::PageUp => self.select(place.saturating_sub(PAGE), lines),
            KeyCode::Home | KeyCode::Char('g') => self.selected = None,
            KeyCode::End | KeyCode::Char('G') => self.select(usize::MAX, lines),
            KeyCode::Enter | KeyCode::Char(' ') => self.turn_over(lines.get(place)),
            KeyCode::Right => self.turn_over(lines.get(place).filter(|line| !line.is_open)),
            KeyCode::Left => match lines.get(place) {
                Some(line) if line.is_open => self.turn_over(Some(line)),
                Some(line) if line.level > 0 => {
                    let above = lines[..place].iter().rposition(|above| above.level < line.level);
                    self.select(above.unwrap_or(0), lines);
                }
                _ => {}
            },
            KeyCode::Char('o' | '>') => choice.sort = choice.sort.next(),
            KeyCode::Char('<') => choice.sort = choice.sort.previous(),
            KeyCode::Char(digit @ '1'..='5') => choice.sort = Column::ALL[digit as usize - '1' as usize],
            KeyCode::Char('r') => choice.is_reverse = !choice.is_reverse,
            KeyCode::Tab | KeyCode::Char('t') => {
                choice.group = choice.group.next();
                if choice.group == Group::Thread && !self.has_threads {
                    choice.group = choice.group.next();
                    "threads are not known here: left out".clone_into(&mut self.message);
                }
                self.selected = None;
            }
            KeyCode::Char('/') => self.mode = Mode::Filter(choice.filter.clone()),
            KeyCode::Esc => {
                choice.filter.clear();
                self.message.clear();
            }
            KeyCode::Char('c') => choice.opened.clear(),
            KeyCode::Char('b') => return Some(Command::SetBaseline),
            KeyCode::Char('B') => return Some(Command::ClearBaseline),
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('s') if self.is_saving => return Some(Command::EndSave),
            KeyCode::Char('s') => self.mode = Mode::Save(self.offered_name.clone()),
            KeyCode::Char('v') => self.show(Mode::Verdict),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.show(Mode::Help),
            _ => {}
        }
        None
    }

    fn select(&mut self, place: usize, lines: &[Line]) {
        let place = place.min(lines.len().saturating_sub(1));
        self.cursor = place;
        self.selected = lines.get(place).map(|line| line.key);
    }

    /// Opens or closes a line. One that is selected stays so.
    fn turn_over(&mut self, line: Option<&Line>) {
        let Some(line) = line.filter(|line| line.has_callers) else {
            return;
        };
        self.selected = Some(line.key);
        if !self.choice.opened.remove(&line.key) {
            self.choice.opened.insert(line.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::watch::Amount;
    use super::*;

    fn line(key: u64, level: usize) -> Line {
        Line {
            key,
            has_callers: true,
            is_open: false,
            level,
            label: key.to_string(),
            frame: None,
            amount: Amount::default(),
            stacks: Vec::new(),
        }
    }

    fn press(state: &mut State, keys: &str, lines: &[Line]) -> Vec<Command> {
        let code = |c| match c {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            '↓' => KeyCode::Down,
            '↑' => KeyCode::Up,
            '←' => KeyCode::Left,
            '→' => KeyCode::Right,
            '⌫' => KeyCode::Backspace,
            c => KeyCode::Char(c),
        };
        keys.chars().filter_map(|c| state.key(code(c).into(), lines)).collect()
    }

    #[test]
    fn the_selection_follows_its_line() {
        let mut lines = vec![line(1, 0), line(2, 0), line(3, 0)];
        let mut state = State::default();
        press(&mut state, "↓", &lines);
        assert_eq!((state.selected, state.place(&lines)), (Some(2), 1));
        lines.swap(1, 2);
        assert_eq!(state.place(&lines), 2);
        press(&mut state, "↓↓↓", &lines);
        assert_eq!(state.selected, Some(2));
        press(&mut state, "g", &lines);
        lines.swap(0, 1);
        assert_eq!(state.place(&lines), 0);
        // So does another order.
        for key in ["o", "2", "r", "b"] {
            press(&mut state, "↓", &lines);
            assert!(state.selected.is_some());
            press(&mut state, key, &lines);
            assert_eq!((state.selected, state.place(&lines)), (None, 0), "{key}");
        }
        // What has gone leaves the place.
        press(&mut state, "↓", &lines);
        lines.truncate(1);
        assert_eq!(state.place(&lines), 0);
        press(&mut state, "↓↑G \n", &[]);
    }

    #[test]
    fn lines_open_and_close() {
        let lines = [line(1, 0), line(2, 1), line(3, 0)];
        let mut state = State::default();
        press(&mut state, "↓→", &lines);
        assert!(state.choice.opened.contains(&2));
        press(&mut state, "←", &lines);
        assert_eq!(state.selected, Some(1));
        press(&mut state, "\n", &lines);
        assert!(state.choice.opened.contains(&1));
        press(&mut state, " c", &lines);
        assert!(state.choice.opened.is_empty());
    }

    #[test]
    fn texts_are_typed() {
        let mut state = State::default();
        press(&mut state, "/abq⌫\n", &[]);
        assert_eq!((state.choice.filter.as_str(), &state.mode), ("ab", &Mode::Table));
        press(&mut state, "/x\x1b", &[]);
        assert_eq!(state.choice.filter, "ab");
        press(&mut state, "\x1b", &[]);
        assert_eq!(state.choice.filter, "");
        state.offered_name = "run".to_owned();
        assert_eq!(press(&mut state, "s2\n", &[]), [Command::Save("run2".to_owned())]);
        state.is_saving = true;
        assert_eq!(press(&mut state, "sq", &[]), [Command::EndSave, Command::Quit]);
        state.mode = Mode::Save(String::new());
        assert_eq!(press(&mut state, &"y".repeat(1000), &[]), []);
        assert_eq!(state.mode, Mode::Save("y".repeat(MAX_TYPED)));
        let mut key = KeyEvent::from(KeyCode::Char('c'));
        key.modifiers = KeyModifiers::CONTROL;
        assert_eq!(state.key(key, &[]), Some(Command::Quit));
    }

    #[test]
    fn columns_and_groups_go_round() {
        let mut state = State::default();
        press(&mut state, "2", &[]);
        assert_eq!(state.choice.sort, Column::Growth);
        press(&mut state, "<<", &[]);
        assert_eq!(state.choice.sort, Column::Age);
        press(&mut state, "or", &[]);
        assert_eq!((state.choice.sort, state.choice.is_reverse), (Column::Live, true));
        press(&mut state, "ttt", &[]);
        assert_eq!(state.choice.group, Group::Line);
        state.has_threads = true;
        press(&mut state, "ttt", &[]);
        assert_eq!(state.choice.group, Group::Thread);
        press(&mut state, "?jx", &[]);
        assert_eq!((&state.mode, state.top), (&Mode::Table, 0));
        assert_eq!(
            press(&mut state, "bB", &[]),
            [Command::SetBaseline, Command::ClearBaseline]
        );
    }
}
