//! The picture of a state: what is in which cell. Draws into a ratatui frame, of any size.

use super::rows::{Column, Group, Line as Row, Lines};
use super::state::{Mode, State};
use super::text::{fit, fit_end, resample, width};
use super::watch::{Amount, Bounded, Picture};
use crate::collect::tree::NamedFrame;
use crate::profile::interval::of_bytes;
use crate::report::human::{self, Human};
use crate::report::leaks::render::{Detail, headline, render};
use crate::report::leaks::{Overall, Report};
use crate::report::types::TypeRow;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Sparkline;
use std::sync::Arc;
use std::time::Duration;

/// Below this size there is no room for anything.
const LEAST: (u16, u16) = (20, 4);
/// Columns of the name of a type.
const LONGEST_TYPE: usize = 40;
/// Sites of the verdict.
const VERDICT_SITES: usize = 20;

/// What the first lines tell.
#[derive(Debug, Clone, Default)]
pub struct Header {
    /// The process.
    pub pid: i32,
    /// Its command line.
    pub command: String,
    /// The version of its Python.
    pub python: String,
    /// When we came: the time of day in UTC, as `15:03:11`.
    pub attached_at: String,
    /// Resident bytes then.
    pub rss_first: u64,
    /// And now.
    pub rss: u64,
    /// How long a thread stood still for the attach.
    pub stop_time: Duration,
    /// What was lost; empty if nothing was.
    pub losses: String,
    /// What becomes of the files, if there are any.
    pub saving: String,
}

/// All that is drawn.
pub struct View<'a> {
    /// The process.
    pub header: &'a Header,
    /// The numbers.
    pub picture: &'a Picture,
    /// The table.
    pub lines: &'a Lines,
    /// The place of the selected line.
    pub place: usize,
    /// The selected line over time.
    pub past: &'a [f64],
    /// The types of its survivors, as far as they are known.
    pub types: &'a [TypeRow],
    /// They are those of now, and the rest stands still.
    pub are_types_later: bool,
    /// The verdict, as soon as there is one.
    pub report: Option<&'a Report>,
    /// Source lines, as far as they are known.
    pub source: &'a dyn Fn(&NamedFrame) -> Option<Arc<str>>,
    /// Whether there may be colours.
    pub has_colour: bool,
}

/// Draws; moves the first line that is shown so that the selected one is visible.
pub fn draw(frame: &mut Frame<'_>, view: &View<'_>, state: &mut State) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        put(frame, area, 0, Line::raw("too small"));
        return;
    }
    let mut page = Page {
        frame,
        area,
        next: 0,
        view,
    };
    page.title(state);
    page.process();
    page.numbers();
    page.verdict();
    match &state.mode {
        Mode::Help => page.text(HELP.lines().map(str::to_owned).collect(), &mut state.top),
        Mode::Verdict => page.text(page.verdict_text(), &mut state.top),
        _ => page.table_and_more(state),
    }
    page.prompt(state);
}

fn put(frame: &mut Frame<'_>, area: Rect, row: u16, line: Line<'_>) {
    if row < area.height {
        let width = area.width;
        frame.buffer_mut().set_line(area.x, area.y + row, &line, width);
    }
}

/// What is being drawn, from top to bottom.
struct Page<'a, 'b, 'c> {
    frame: &'a mut Frame<'b>,
    area: Rect,
    /// The next free row.
    next: u16,
    view: &'a View<'c>,
}

impl Page<'_, '_, '_> {
    fn columns(&self) -> usize {
        usize::from(self.area.width)
    }

    /// Rows that are free above the last one.
    fn free(&self) -> u16 {
        self.area.height.saturating_sub(self.next + 1)
    }

    fn line(&mut self, line: Line<'_>) {
        if self.free() > 0 {
            put(self.frame, self.area, self.next, line);
            self.next += 1;
        }
    }

    fn bold() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn colour(&self, style: Style, colour: Color) -> Style {
        if self.view.has_colour { style.fg(colour) } else { style }
    }

    fn title(&mut self, state: &State) {
        let header = self.view.header;
        let start = format!("pyheap  PID {}  Python {}  ", header.pid, fit(&header.python, 20));
        let end = if state.is_paused { "  PAUSED" } else { "" };
        let room = self.columns().saturating_sub(width(&start) + end.len());
        let command = fit(&header.command, room);
        let gap = " ".repeat(room.saturating_sub(width(&command)));
        self.line(Line::from(vec![
            Span::styled(start, Self::bold()),
            Span::raw(command),
            Span::raw(gap),
            Span::styled(end, Self::bold().add_modifier(Modifier::REVERSED)),
        ]));
    }

    fn process(&mut self) {
        let header = self.view.header;
        let text = format!(
            "attached {} UTC, {} ago  RSS {} → {}  stopped {} µs",
            header.attached_at,
            Human(Duration::from_secs(self.view.picture.at.as_secs())),
            human::bytes(header.rss_first as f64),
            human::bytes(header.rss as f64),
            human::count(header.stop_time.as_micros() as f64),
        );
        self.line(Line::raw(fit(&text, self.columns())));
    }

    fn numbers(&mut self) {
        let picture = self.view.picture;
        let live = &picture.total.live;
        let text = format!(
            "live {} ± {}  {} samples/s of {}  ",
            human::bytes(live.bytes),
            human::bytes(margin(&picture.total, picture.period)),
            human::count(picture.samples_per_second),
            human::exact_bytes(picture.period),
        );
        let losses = &self.view.header.losses;
        let (lost, style) = if losses.is_empty() {
            ("nothing lost".to_owned(), Style::new())
        } else {
            (format!("lost: {losses}"), self.colour(Self::bold(), Color::Red))
        };
        let lost = fit(&lost, self.columns().saturating_sub(width(&text)));
        self.line(Line::from(vec![
            Span::styled(text, Self::bold()),
            Span::styled(lost, style),
        ]));
    }

    fn verdict(&mut self) {
        let (text, colour) = match self.view.report {
            None => ("no verdict yet".to_owned(), None),
            Some(report) if !report.is_long_enough => ("no verdict yet".to_owned(), None),
            Some(report) => {
                let colour = if report.verdict == Overall::NoLeak {
                    Color::Green
                } else {
                    Color::Red
                };
                (headline(report), Some(colour))
            }
        };
        let style = colour.map_or(Self::bold(), |colour| self.colour(Self::bold(), colour));
        self.line(Line::styled(fit(&text, self.columns()), style));
    }

    fn verdict_text(&self) -> Vec<String> {
        match self.view.report {
            Some(report) => render(report, Detail::Verbose, VERDICT_SITES)
                .lines()
                .map(str::to_owned)
                .collect(),
            None => vec!["There is no verdict yet.".to_owned()],
        }
    }

    /// A page of text that can be scrolled.
    fn text(&mut self, lines: Vec<String>, top: &mut usize) {
        *top = (*top).min(lines.len().saturating_sub(usize::from(self.free())));
        for line in lines.iter().skip(*top) {
            self.line(Line::raw(fit(line, self.columns())));
        }
        self.next = self.area.height.saturating_sub(1);
    }

    fn table_and_more(&mut self, state: &mut State) {
        let course = &self.view.picture.course;
        if self.area.height >= 16 {
            let rss = self.view.header.rss as f64;
            self.spark("heap", &course.heap, self.view.picture.total.live.bytes, Color::Cyan);
            self.spark("RSS", &course.rss, rss, Color::Blue);
        }
        // The pane of the selected line is as high as the table can spare.
        let pane = match self.free() {
            0..10 => 0,
            10..24 => 4,
            free => (free / 4).min(12),
        };
        self.table(state, pane);
        if pane > 0 {
            self.pane(pane);
        }
    }

    /// One line: name, course, value.
    fn spark(&mut self, name: &str, values: &[f64], now: f64, colour: Color) {
        let text = human::bytes(now);
        put(self.frame, self.area, self.next, Line::raw(format!("{name:<5}")));
        let columns = self.area.width.saturating_sub(16);
        self.bars(
            values,
            Rect::new(self.area.x + 5, self.area.y + self.next, columns, 1),
            colour,
        );
        let end = Line::raw(format!("{text:>10}"));
        let place = self.area.x + self.area.width.saturating_sub(10);
        self.frame
            .buffer_mut()
            .set_line(place, self.area.y + self.next, &end, 10);
        self.next += 1;
    }

    /// Bars from 0 to the largest value, the last value at the right.
    fn bars(&mut self, values: &[f64], area: Rect, colour: Color) {
        let values: Vec<u64> = resample(values, usize::from(area.width))
            .iter()
            .map(|value| *value as u64)
            .collect();
        let bars = Sparkline::default()
            .data(values)
            .style(self.colour(Style::new(), colour));
        self.frame.render_widget(bars, area);
    }

    fn table(&mut self, state: &mut State, pane: u16) {
        let columns = Columns::new(self.columns(), state);
        let head = columns.head(state);
        let style = Self::bold().add_modifier(Modifier::UNDERLINED);
        let head = format!("{:<columns$}", fit(&head, self.columns()), columns = self.columns());
        self.line(Line::styled(head, style));
        let rows = usize::from(self.free().saturating_sub(pane));
        if rows == 0 {
            return;
        }
        let place = self.view.place;
        state.top = state.top.min(self.view.lines.lines.len().saturating_sub(rows));
        state.top = state.top.clamp((place + 1).saturating_sub(rows), place);
        let end = self.next + rows as u16;
        for (number, row) in self.view.lines.lines.iter().enumerate().skip(state.top).take(rows) {
            let numbers = columns.numbers(&row.amount, self.view.picture);
            let site = self.site(row, self.columns().saturating_sub(columns.width));
            let style = if number == place {
                Style::new().add_modifier(Modifier::REVERSED)
            } else {
                Style::new()
            };
            let text = format!("{numbers}{site}");
            let gap = " ".repeat(self.columns().saturating_sub(width(&text)));
            self.line(Line::styled(text + &gap, style));
        }
        if self.view.lines.lines.is_empty() {
            let text = if self.view.lines.all_rows > 0 {
                "no row has the text of the filter (Esc shows all)"
            } else {
                "nothing that was allocated since the attach is alive yet"
            };
            self.line(Line::raw(fit(text, self.columns())));
        }
        self.next = end;
    }

    /// Sign, indentation, place, and source if there is room.
    fn site(&self, row: &Row, room: usize) -> String {
        let sign = match (row.has_callers, row.is_open) {
            (false, _) => "  ",
            (true, true) => "▾ ",
            (true, false) => "▸ ",
        };
        // Ever deeper levels would leave no room for anything.
        let indent = " ".repeat(row.level.min(room / 3));
        let mut site = format!("{indent}{sign}");
        let room = room.saturating_sub(width(&site));
        let place = fit_end(&row.label, room);
        let left = room.saturating_sub(width(&place));
        site.push_str(&place);
        if left > 12
            && let Some(source) = row.frame.as_ref().and_then(|frame| (self.view.source)(frame))
        {
            site.push_str("  │ ");
            site.push_str(&fit(&source, left - 4));
        }
        site
    }

    fn pane(&mut self, rows: u16) {
        let Some(row) = self.view.lines.lines.get(self.view.place) else {
            self.next += rows;
            return;
        };
        let amount = &row.amount;
        let age = amount
            .age()
            .map_or_else(String::new, |age| format!(", mean age {}", short_time(age)));
        let text = format!(
            " ── {} in {} samples, some {} objects{age}",
            human::bytes(amount.live.bytes),
            human::count(amount.live.samples as f64),
            human::count(amount.live.objects),
        );
        let source = row.frame.as_ref().and_then(|frame| (self.view.source)(frame));
        let place = fit_end(&row.label, self.columns().saturating_sub(width(&text)));
        self.line(Line::styled(format!("{place}{text}"), Self::bold()));
        let mut left = rows.saturating_sub(1);
        if let Some(source) = source.filter(|_| left > 1) {
            self.line(Line::raw(fit(&format!("   {source}"), self.columns())));
            left -= 1;
        }
        if !self.view.types.is_empty() && left > 1 {
            let start = if self.view.are_types_later { "   now: " } else { "   " };
            let types = types(self.view.types, self.columns().saturating_sub(start.len()));
            self.line(Line::raw(format!("{start}{types}")));
            left -= 1;
        }
        let most = self.view.past.iter().copied().fold(0.0, f64::max);
        put(
            self.frame,
            self.area,
            self.next,
            Line::raw(format!("{:>10} ", human::bytes(most))),
        );
        let area = Rect::new(
            self.area.x + 11,
            self.area.y + self.next,
            self.area.width.saturating_sub(11),
            left,
        );
        self.bars(self.view.past, area, Color::Yellow);
        if left > 1 {
            put(
                self.frame,
                self.area,
                self.next + left - 1,
                Line::raw(format!("{:>10} ", "0 B")),
            );
        }
        self.next += left;
    }

    /// The last line: what is typed, what was said, or what keys there are.
    fn prompt(&mut self, state: &State) {
        let lines = self.view.lines;
        let columns = self.columns();
        let typed = |what: &str, text: &str| {
            let room = columns.saturating_sub(what.len() + 1);
            format!("{what}{}▏", fit_end(text, room))
        };
        let text = match &state.mode {
            Mode::Filter(_) => typed("filter: ", &state.choice.filter),
            Mode::Save(name) => typed("save from now on as: ", name),
            Mode::Help | Mode::Verdict => "↑ ↓ scroll   any other key: back".to_owned(),
            Mode::Table if !state.message.is_empty() => state.message.clone(),
            Mode::Table => {
                let mut parts = vec!["q quit  ? help".to_owned()];
                if !self.view.header.saving.is_empty() {
                    parts.push(self.view.header.saving.clone());
                }
                if !state.choice.filter.is_empty() {
                    parts.push(format!(
                        "filter “{}”: {} of {}",
                        state.choice.filter, lines.rows, lines.all_rows
                    ));
                }
                if let Some(baseline) = self.view.picture.baseline {
                    let ago = self.view.picture.at.saturating_sub(baseline).as_secs();
                    parts.push(format!("baseline {} ago", Human(Duration::from_secs(ago))));
                }
                parts.push(format!("by {}", state.choice.group.name()));
                parts.push("o sort  / filter  ⏎ open  b baseline  s save  p pause  v verdict".to_owned());
                parts.join("  ")
            }
        };
        let row = self.area.height - 1;
        put(self.frame, self.area, row, Line::raw(fit(&text, columns)));
    }
}

/// Half the width of the 95 % interval of live bytes, the larger half.
#[must_use]
pub fn margin(amount: &Amount, period: u64) -> f64 {
    let live = &amount.live;
    let limits = of_bytes(live.bytes, live.variance, live.samples, period);
    f64::max(limits.high - live.bytes, live.bytes - limits.low)
}

/// `+1.2 MiB`.
fn signed(bytes: f64) -> String {
    let text = human::bytes(bytes);
    if bytes > 0.0 { format!("+{text}") } else { text }
}

fn signed_count(count: f64) -> String {
    if count < 0.0 {
        format!("-{}", human::count(-count))
    } else {
        format!("+{}", human::count(count))
    }
}

/// `dict ×41,000 ± 1,200, str ×300 ± 90, 3 more types`: as many as there is room for, one at least.
fn types(rows: &[TypeRow], columns: usize) -> String {
    let one = |row: &TypeRow| {
        let (objects, margin) = (human::count(row.objects), human::count(row.objects_margin));
        // Of a long one the end says most.
        format!("{} ×{objects} ± {margin}", fit_end(&row.name, LONGEST_TYPE))
    };
    let rest = |shown: usize| match rows.len().saturating_sub(shown) {
        0 => String::new(),
        1 => ", 1 more type".to_owned(),
        left => format!(", {} more types", human::count(left as f64)),
    };
    let mut text = rows.first().map_or_else(String::new, one);
    let mut shown = 1;
    for row in rows.iter().skip(1) {
        let longer = format!("{text}, {}", one(row));
        if width(&longer) + width(&rest(shown + 1)) > columns {
            break;
        }
        text = longer;
        shown += 1;
    }
    fit(&(text + &rest(shown)), columns)
}

/// `12s`, `3m`, `2.5h`, `3d`.
fn short_time(seconds: f64) -> String {
    match seconds {
        s if s < 99.5 => format!("{s:.0}s"),
        s if s < 5970.0 => format!("{:.0}m", s / 60.0),
        s if s < 356_400.0 => format!("{:.0}h", s / 3600.0),
        s => format!("{:.0}d", s / 86_400.0),
    }
}

/// Which columns there is room for.
struct Columns {
    shown: Vec<Column>,
    /// Of all of them.
    width: usize,
}

impl Columns {
    /// Live and growth with their errors; the others where there is room, or instead of growth if they are sorted by.
    fn new(columns: usize, state: &State) -> Self {
        let shown = match columns {
            100.. => Column::ALL.to_vec(),
            70..100 => match state.choice.sort {
                Column::Live | Column::Growth => vec![Column::Live, Column::Growth],
                sort => vec![Column::Live, sort],
            },
            _ => vec![state.choice.sort],
        };
        let width = shown.iter().map(|column| Self::width_of(*column)).sum();
        Self { shown, width }
    }

    fn width_of(column: Column) -> usize {
        match column {
            Column::Live | Column::Growth => 22,
            Column::Objects | Column::Rate => 12,
            Column::Age => 6,
        }
    }

    fn head(&self, state: &State) -> String {
        let mut head = String::new();
        for column in &self.shown {
            let name = match column {
                Column::Live if state.has_baseline => "CHANGE",
                Column::Live => "LIVE",
                Column::Growth => "GROWTH/MIN",
                Column::Objects => "OBJECTS",
                Column::Rate => "ALLOC/S",
                Column::Age => "AGE",
            };
            let mark = match (state.choice.sort == *column, state.choice.is_reverse) {
                (true, false) => "▾",
                (true, true) => "▴",
                _ => "",
            };
            let name = format!("{mark}{name}");
            head += &match column {
                Column::Live | Column::Growth => format!("{name:>10} {:>10} ", "± 95 %"),
                other => format!("{name:>columns$} ", columns = Self::width_of(*other) - 1),
            };
        }
        head + match state.choice.group {
            Group::Line => "  SITE",
            Group::Function => "  FUNCTION",
            Group::File => "  FILE",
            Group::Thread => "  THREAD",
        }
    }

    fn numbers(&self, amount: &Amount, picture: &Picture) -> String {
        let has_baseline = picture.baseline.is_some();
        let mut numbers = String::new();
        for column in &self.shown {
            numbers += &match column {
                Column::Live if has_baseline => {
                    format!(
                        "{:>10} {:>10} ",
                        signed(amount.since.value),
                        human::bytes(amount.since.margin())
                    )
                }
                Column::Live => format!(
                    "{:>10} {:>10} ",
                    human::bytes(amount.live.bytes),
                    human::bytes(margin(amount, picture.period))
                ),
                // A rate of a second or two says nothing, nor does one without a sample.
                Column::Growth if picture.window < 5.0 || amount.growth == Bounded::default() => {
                    format!("{:>10} {:>10} ", "-", "-")
                }
                Column::Growth => {
                    let minutes = picture.window / 60.0;
                    let (rate, error) = (amount.growth.value / minutes, amount.growth.margin() / minutes);
                    format!("{:>10} {:>10} ", signed(rate), human::bytes(error))
                }
                Column::Objects if has_baseline => format!("{:>11} ", signed_count(amount.objects_since)),
                Column::Objects => format!("{:>11} ", human::count(amount.live.objects)),
                Column::Rate => {
                    let rate = amount.allocated / picture.window.max(1.0);
                    format!("{:>11} ", human::bytes(rate))
                }
                Column::Age => {
                    let age = amount.age().map_or_else(|| "-".to_owned(), short_time);
                    format!("{age:>5} ")
                }
            };
        }
        numbers
    }
}

/// What `?` shows.
const HELP: &str = "\
Every number is an estimate from samples, of what was allocated since the attach.
LIVE        bytes that are alive, with half the width of the 95 % interval
GROWTH/MIN  change of that over the last minute, per minute; ± is rough if it is few
OBJECTS     objects that are alive       ALLOC/S  bytes allocated a second, same time
AGE         mean age of the live bytes   SITE     the line that allocates
verdict     judged as by `pyheap leaks`, since the attach or the last new period

↑ ↓ j k PgUp PgDn g G   select        ⏎ space → ←   open: who calls it; close
o > <  1 … 5            sort by       r             the other way round
t Tab                   rows: lines, functions, files, threads
/                       rows with a text; Esc in the table shows all
b                       baseline: from now on the change is shown (CHANGE)
B                       no baseline   c             close all
p                       pause what is shown; the recording goes on
s                       save from now on into files, with what is alive; s ends them
v                       verdict       Ctrl-L        draw anew
Ctrl-Z                  suspend; the hooks stay, and what does not fit is lost
q Ctrl-C                quit and detach: the process is left as it was
";

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
