//! Sends profiles to what takes Pyroscope's `/ingest`: a queue in front of one thread that tries until it succeeds.
//!
//! `POST /ingest?name=APP{label=value,…}&from=…&until=…&format=pprof&spyName=pyheap` with the profile as the body; times are Unix
//! seconds (<https://grafana.com/docs/pyroscope/latest/reference-server-api/>). The server adds up what is pushed, so the allocated
//! values are those of the interval, and the live ones are those at its end.
//!
//! Whoever makes profiles never waits for the network: what does not fit into the queue takes the place of the oldest, and is counted.

use super::served::lock;
use super::tls::Tls;
use crate::attach::privileges;
use crate::threads;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header;
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncRead, AsyncWrite};

/// Profiles that wait to be sent, and their bytes.
const MOST: usize = 1024;
const MOST_BYTES: usize = 32 << 20;
/// Time for one attempt.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Time between two attempts: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time for what is left when we go. A server that fails gets one more attempt only.
const AT_END: Duration = Duration::from_secs(10);
/// Bytes of an answer that are looked at.
const ANSWER_BYTES: usize = 4096;

/// Where profiles go, and as whose.
#[derive(Debug, Clone)]
pub struct Place {
    host: String,
    port: u16,
    /// With its query, if it has one.
    path: String,
    authority: String,
    /// https: the server must prove who it is, see [`Place::trust`].
    pub is_secure: bool,
    tls: Option<Tls>,
    /// What `Authorization` says.
    pub authorization: Option<String>,
    /// `X-Scope-OrgID`.
    pub tenant: Option<String>,
}

impl Place {
    /// That of a URL. Without a path it is `/ingest`.
    ///
    /// # Errors
    /// When it is none that can be pushed to; says why.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error| format!("{url} is no URL: {error}"))?;
        let is_secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(format!("{url} must begin with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| format!("{url} has no host"))?;
        if authority.as_str().contains('@') {
            return Err("a password does not belong into a URL: use --token-file".into());
        }
        let path = match uri.path_and_query().map(|path| path.as_str()) {
            None | Some("" | "/") => "/ingest",
            Some(path) => path,
        };
        Ok(Self {
            host: authority
                .host()
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned(),
            port: authority.port_u16().unwrap_or(if is_secure { 443 } else { 80 }),
            path: path.to_owned(),
            authority: authority.to_string(),
            is_secure,
            tls: None,
            authorization: None,
            tenant: None,
        })
    }

    /// With https: whom to believe that they know the server, beside whom this system believes.
    ///
    /// # Errors
    /// With a sentence, when nobody is trusted, or the file has no certificates.
    pub fn trust(&mut self, file: Option<&Path>) -> Result<(), String> {
        self.tls = Some(Tls::new(file)?);
        Ok(())
    }
}

/// A profile that is to be sent.
#[derive(Debug, Clone)]
pub struct Parcel {
    /// `APP{label=value,…}`.
    pub name: String,
    /// When it begins.
    pub from: SystemTime,
    /// When it ends.
    pub until: SystemTime,
    /// The gzipped profile.
    pub body: Vec<u8>,
}

/// The name of an application with labels, as Pyroscope reads it: characters that mean something in it are replaced.
#[must_use]
pub fn name(app: &str, labels: &[(String, String)]) -> String {
    let safe = |text: &str| -> String {
        let kept = |c: char| {
            if c.is_ascii_alphanumeric() || "_.:/-".contains(c) {
                c
            } else {
                '_'
            }
        };
        text.chars().take(100).map(kept).collect()
    };
    let labels: Vec<_> = labels
        .iter()
        .map(|(key, value)| format!("{}={}", safe(key), safe(value)))
        .collect();
    format!("{}{{{}}}", safe(app), labels.join(","))
}

/// How it goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Profiles that have arrived.
    pub sent: u64,
    /// Profiles for which there was no room, which the server refused, or that were left at the end.
    pub dropped: u64,
    /// Attempts that have failed.
    pub failed: u64,
    /// What was wrong with the last of them.
    pub why: String,
    /// Whether it is wrong still.
    pub in_trouble: bool,
}

impl Progress {
    fn fail(&mut self, why: String) {
        self.failed += 1;
        self.why = why;
        self.in_trouble = true;
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Parcel>,
    bytes: usize,
    progress: Progress,
    /// By when to be through.
    end: Option<Instant>,
}

/// The queue and its thread.
#[derive(Debug)]
pub struct Pusher {
    shared: Arc<(Mutex<State>, Condvar)>,
    thread: JoinHandle<()>,
}

impl Pusher {
    /// Starts the thread.
    ///
    /// # Errors
    /// When that is not possible.
    pub fn start(place: Place) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let thread = {
            let shared = Arc::clone(&shared);
            threads::start("push", move || {
                privileges::drop_all();
                run(&shared, &place, &runtime);
            })?
        };
        Ok(Self { shared, thread })
    }

    /// Puts a profile at the end of the queue. Never waits.
    pub fn send(&self, parcel: Parcel) {
        lock(&self.shared.0).add(parcel);
        self.shared.1.notify_all();
    }

    /// How it goes.
    #[must_use]
    pub fn progress(&self) -> Progress {
        lock(&self.shared.0).progress.clone()
    }

    /// Sends what is left, as far as that goes in a few seconds.
    #[must_use]
    pub fn finish(self) -> Progress {
        lock(&self.shared.0).end = Some(Instant::now() + AT_END);
        self.shared.1.notify_all();
        let _ = self.thread.join();
        let mut state = lock(&self.shared.0);
        state.progress.dropped += state.queue.len() as u64;
        state.queue.clear();
        state.progress.clone()
    }
}

impl State {
    fn add(&mut self, parcel: Parcel) {
        self.bytes += parcel.body.len();
        self.queue.push_back(parcel);
        while self.queue.len() > MOST || self.bytes > MOST_BYTES {
            let Some(oldest) = self.queue.pop_front() else { return };
            self.bytes -= oldest.body.len();
            self.progress.dropped += 1;
        }
    }

    /// The next one, taken out: what comes meanwhile does not push it out.
    fn take(&mut self) -> Option<Parcel> {
        let parcel = self.queue.pop_front()?;
        self.bytes -= parcel.body.len();
        Some(parcel)
    }
}

/// What has become of an attempt.
enum Sent {
    Yes,
    /// It makes no sense to try again.
    Never(String),
    Later(String),
}

fn run(shared: &(Mutex<State>, Condvar), place: &Place, runtime: &tokio::runtime::Runtime) {
    let mut pause = FIRST_PAUSE;
    while let Some(parcel) = next(shared) {
        loop {
            let left = lock(&shared.0)
                .end
                .map(|end| end.saturating_duration_since(Instant::now()));
            let time = left.map_or(ATTEMPT, |left| left.min(ATTEMPT));
            let sent = runtime.block_on(async {
                match tokio::time::timeout(time, attempt(place, &parcel)).await {
                    Ok(sent) => sent,
                    Err(_) => Sent::Later(format!("no answer within {} s", time.as_secs())),
                }
            });
            match sent {
                Sent::Yes => {
                    pause = FIRST_PAUSE;
                    let mut state = lock(&shared.0);
                    state.progress.sent += 1;
                    state.progress.in_trouble = false;
                    break;
                }
                Sent::Never(why) => {
                    let mut state = lock(&shared.0);
                    state.progress.dropped += 1;
                    state.progress.fail(why);
                    break;
                }
                Sent::Later(why) => {
                    lock(&shared.0).progress.fail(why);
                    // That was the last attempt.
                    if left.is_some() {
                        lock(&shared.0).progress.dropped += 1;
                        return;
                    }
                    wait(shared, pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// The next profile; `None` when there will be none.
fn next(shared: &(Mutex<State>, Condvar)) -> Option<Parcel> {
    let mut state = lock(&shared.0);
    loop {
        let over = state.end.is_some_and(|end| Instant::now() >= end);
        if let Some(parcel) = if over { None } else { state.take() } {
            return Some(parcel);
        }
        if state.end.is_some() {
            return None;
        }
        state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Waits before the next attempt, up to half as long again, so that many do not come back together; not when we go.
fn wait(shared: &(Mutex<State>, Condvar), pause: Duration) {
    let until = Instant::now() + pause.mul_f64(1.0 + rand::random::<f64>() / 2.0);
    let mut state = lock(&shared.0);
    loop {
        let now = Instant::now();
        if now >= until || state.end.is_some() {
            return;
        }
        let woken = shared.1.wait_timeout(state, until - now);
        state = woken.unwrap_or_else(PoisonError::into_inner).0;
    }
}

async fn attempt(place: &Place, parcel: &Parcel) -> Sent {
    match post(place, parcel).await {
        Ok((200..=299, _)) => Sent::Yes,
        Ok((status @ (408 | 425 | 429 | 500..=599), text)) => Sent::Later(format!("the server says {status}: {text}")),
        Ok((status, text)) => Sent::Never(format!("the server says {status}: {text}")),
        Err(error) => Sent::Later(error.to_string()),
    }
}

/// Status and beginning of the answer.
async fn post(place: &Place, parcel: &Parcel) -> Result<(u16, String), Box<dyn std::error::Error + Send + Sync>> {
    let stream = tokio::net::TcpStream::connect((place.host.as_str(), place.port)).await?;
    match &place.tls {
        None if place.is_secure => Err("nobody is trusted".into()),
        None => post_on(stream, place, parcel).await,
        Some(tls) => post_on(tls.connect(&place.host, stream).await?, place, parcel).await,
    }
}

async fn post_on(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    place: &Place,
    parcel: &Parcel,
) -> Result<(u16, String), Box<dyn std::error::Error + Send + Sync>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the request: nobody else uses the connection.
    let connection = tokio::spawn(connection);
    let mut request = Request::post(target(place, parcel))
        .header(header::HOST, &place.authority)
        .header(header::USER_AGENT, concat!("pyheap/", env!("CARGO_PKG_VERSION")))
        .header(header::CONTENT_TYPE, "application/octet-stream");
    if let Some(authorization) = &place.authorization {
        request = request.header(header::AUTHORIZATION, authorization);
    }
    if let Some(tenant) = &place.tenant {
        request = request.header("X-Scope-OrgID", tenant);
    }
    let request = request.body(Full::new(Bytes::from(parcel.body.clone())))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status().as_u16();
    // More than that nobody wants to read.
    let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await;
    connection.abort();
    let text = body.map(|body| body.to_bytes()).unwrap_or_default();
    let text: String = String::from_utf8_lossy(&text).chars().take(200).collect();
    Ok((status, crate::report::human::clean(text.trim()).into_owned()))
}

fn target(place: &Place, parcel: &Parcel) -> String {
    let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut target = place.path.clone();
    target.push(if target.contains('?') { '&' } else { '?' });
    let _ = write!(
        target,
        "name={}&from={}&until={}&format=pprof&spyName=pyheap",
        percent(&parcel.name),
        seconds(parcel.from),
        seconds(parcel.until)
    );
    target
}

/// Text as a parameter of a URL.
fn percent(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"_.-".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parcel(bytes: usize) -> Parcel {
        Parcel {
            name: name("app", &[("pid".into(), "7".into())]),
            from: UNIX_EPOCH + Duration::from_secs(100),
            until: UNIX_EPOCH + Duration::from_millis(115_900),
            body: vec![0; bytes],
        }
    }

    #[test]
    fn places() {
        let place = Place::parse("http://[::1]:4040").unwrap();
        assert_eq!(
            (place.host.as_str(), place.port, place.path.as_str()),
            ("::1", 4040, "/ingest")
        );
        let place = Place::parse("http://pyroscope/api/ingest?x=1").unwrap();
        assert_eq!(
            target(&place, &parcel(0)),
            "/api/ingest?x=1&name=app%7Bpid%3D7%7D&from=100&until=115&format=pprof&spyName=pyheap"
        );
        let place = Place::parse("https://a/").unwrap();
        assert!(place.is_secure && place.port == 443);
        for wrong in ["a:80", "http://u:p@a/", "ftp://a", "http://", ""] {
            assert!(Place::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_is_one_whatever_is_in_it() {
        let labels = [("a b".to_owned(), "x,y=z}".to_owned())];
        assert_eq!(name("my app{", &labels), "my_app_{a_b=x_y_z_}");
    }

    #[test]
    fn a_full_queue_drops_the_oldest() {
        let mut state = State::default();
        (0..=MOST).for_each(|size| state.add(parcel(size)));
        assert_eq!((state.queue.len(), state.progress.dropped), (MOST, 1));
        state.add(parcel(MOST_BYTES));
        assert_eq!((state.queue.len(), state.bytes), (1, MOST_BYTES));
        assert_eq!(state.take().map(|parcel| parcel.body.len()), Some(MOST_BYTES));
        assert_eq!((state.bytes, state.progress.dropped), (0, MOST as u64 + 1));
    }
}
