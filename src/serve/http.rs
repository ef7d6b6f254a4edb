//! The HTTP server: one thread, one request a connection, and a limit on everything that a client can make us hold.
//!
//! A connection has so long to say what it wants, and so long to take the answer. Each answer is made by one other thread, one
//! after the other; so many requests may wait for theirs, the others are told to come again. Nobody who connects holds up
//! anything but us.
//!
//! On loopback without a token, any page that a browser shows could ask (DNS rebinding): its `Host` gives it away.

use super::answer::{self, Answer, Before};
use super::metrics;
use super::route::{Route, Whose, Wrong, route};
use super::served::{Served, Set, lock};
use crate::attach::privileges;
use crate::threads;
use http_body_util::Full;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

/// Connections at the same time; others wait to be accepted.
const CONNECTIONS: usize = 256;
/// Requests for a profile or for metrics at the same time, those included that wait for their seconds and those whose client
/// is slow to read.
const IN_FLIGHT: usize = 16;
/// Bytes of a request's line and headers: the least that hyper can be told.
const HEAD_BYTES: usize = 8192;
const HEADERS: usize = 64;
/// Time for sending a request.
const TO_ASK: Duration = Duration::from_secs(10);
/// Time for making an answer, beside the seconds that it is of.
const TO_MAKE: Duration = Duration::from_secs(60);
/// Time for taking an answer.
const TO_TAKE: Duration = Duration::from_secs(30);
/// A request waits for hooks for so long.
const TO_ATTACH: Duration = Duration::from_secs(30);
/// Between two looks whether they are there.
const LOOK: Duration = Duration::from_millis(20);

/// Who may ask, and for what.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// What a request has to show.
    pub token: Option<Token>,
    /// Whether the `Host` of a request must be an address or `localhost`.
    pub only_local_names: bool,
    /// Allocating lines of each process in the metrics.
    pub sites: usize,
}

/// A secret, in the forms in which a request may show it.
#[derive(Clone)]
pub struct Token {
    bearer: String,
    basic: String,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Of this text. `go tool pprof` can only send it as a password: of user `pyheap`.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self {
            bearer: text.to_owned(),
            basic: crate::report::base64::base64(format!("pyheap:{text}").as_bytes()),
        }
    }

    /// Whether an `Authorization` shows it.
    fn is_shown_by(&self, value: &str) -> bool {
        match value.split_once(' ') {
            Some((scheme, shown)) if scheme.eq_ignore_ascii_case("bearer") => same(shown.trim(), &self.bearer),
            Some((scheme, shown)) if scheme.eq_ignore_ascii_case("basic") => same(shown.trim(), &self.basic),
            _ => false,
        }
    }
}

/// Whether two texts are the same; takes as long wherever they differ.
fn same(a: &str, b: &str) -> bool {
    let differs = a.bytes().zip(b.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differs) == 0
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `address` and answers from `set`.
    ///
    /// # Errors
    /// When the address cannot be had, or a thread cannot be started.
    pub fn start(address: SocketAddr, set: Arc<Set>, rules: Rules) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .thread_name("answer")
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let hub = Arc::new(Hub {
            set,
            rules,
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT)),
        });
        let thread = threads::start("http", move || {
            // Whoever talks to strangers has no rights to lose; the thread that makes answers inherits that.
            privileges::drop_all();
            runtime.block_on(async move {
                tokio::select! {
                    () = accept(listener, hub) => {}
                    _ = stopped => {}
                }
            });
            // Who still waits is cut off.
            runtime.shutdown_timeout(Duration::from_millis(100));
        })?;
        Ok(Self {
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What all connections share.
struct Hub {
    set: Arc<Set>,
    rules: Rules,
    in_flight: Arc<Semaphore>,
}

async fn accept(listener: TcpListener, hub: Arc<Hub>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
        return;
    };
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&free).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let hub = Arc::clone(&hub);
                tokio::spawn(async move {
                    hub.set.connections.fetch_add(1, Ordering::Relaxed);
                    serve(stream, &hub).await;
                    hub.set.connections.fetch_sub(1, Ordering::Relaxed);
                    drop(place);
                });
            }
            // No descriptors are left, for example: some will be closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Until when a connection has to be through with what it is at.
#[derive(Clone)]
struct Deadline(Arc<Mutex<Instant>>);

impl Deadline {
    fn within(time: Duration) -> Self {
        Self(Arc::new(Mutex::new(Instant::now() + time)))
    }

    fn set(&self, time: Duration) {
        *lock(&self.0) = Instant::now() + time;
    }

    /// Comes back when it is over.
    async fn over(&self) {
        loop {
            let at = *lock(&self.0);
            if Instant::now() >= at {
                return;
            }
            tokio::time::sleep_until(at).await;
        }
    }
}

async fn serve(stream: TcpStream, hub: &Arc<Hub>) {
    let deadline = Deadline::within(TO_ASK);
    let service = service_fn(|request| {
        let (hub, deadline) = (Arc::clone(hub), deadline.clone());
        async move { Ok::<_, Infallible>(respond(request, &hub, &deadline).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TO_ASK)
        .keep_alive(false)
        .half_close(false)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        _ = connection => {}
        () = deadline.over() => {}
    }
}

async fn respond(request: Request<Incoming>, hub: &Arc<Hub>, deadline: &Deadline) -> Response<Content> {
    let (answer, place) = match refusal(&request, &hub.rules) {
        Some(answer) => (answer, None),
        None => make(&request, hub, deadline).await,
    };
    deadline.set(TO_TAKE);
    hub.set.count(answer.status);
    response(answer, place)
}

/// A body, with the place among those in flight that it keeps until it is sent or given up.
struct Content {
    body: Full<Bytes>,
    _place: Option<tokio::sync::OwnedSemaphorePermit>,
}

impl hyper::body::Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Infallible>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

fn response(answer: Answer, place: Option<tokio::sync::OwnedSemaphorePermit>) -> Response<Content> {
    let mut response = Response::new(Content {
        body: Full::new(answer.body.into()),
        _place: place,
    });
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(answer.kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    if let Some(since) = answer.since.and_then(|since| HeaderValue::from_str(&since).ok()) {
        headers.insert("x-pyheap-since", since);
    }
    match answer.status {
        401 => {
            let ways = HeaderValue::from_static("Bearer, Basic realm=\"pyheap\"");
            headers.insert(header::WWW_AUTHENTICATE, ways);
        }
        405 => {
            headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        503 => {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        _ => {}
    }
    response
}

/// Why a request gets no answer, whatever it asks for.
fn refusal(request: &Request<Incoming>, rules: &Rules) -> Option<Answer> {
    let text = |name: header::HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    if rules.only_local_names && !is_local(text(header::HOST), request.uri().host()) {
        let why = "the Host of the request is a name that is none of this machine's; ask by address or by localhost\n";
        return Some(Answer::text(403, why));
    }
    if let Some(token) = &rules.token
        && request.uri().path() != "/healthz"
        && !text(header::AUTHORIZATION).is_some_and(|value| token.is_shown_by(value))
    {
        return Some(Answer::text(401, "send the header `Authorization: Bearer TOKEN`\n"));
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return Some(Answer::text(405, "only GET and HEAD\n"));
    }
    if !request.body().is_end_stream() {
        return Some(Answer::text(413, "a request has no body here\n"));
    }
    None
}

/// Whether a request was meant for this machine: its host is an address, or `localhost`, or is not said (no browser does that).
fn is_local(header: Option<&str>, uri: Option<&str>) -> bool {
    [header, uri].into_iter().flatten().all(|host| {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    })
}

type Place = Option<tokio::sync::OwnedSemaphorePermit>;

/// The answer, and the place among those in flight that it takes.
async fn make(request: &Request<Incoming>, hub: &Arc<Hub>, deadline: &Deadline) -> (Answer, Place) {
    let route = match route(request.uri().path(), request.uri().query().unwrap_or("")) {
        Ok(route) => route,
        Err(wrong) => return (why(wrong), None),
    };
    if route == Route::Health {
        return (Answer::text(200, "ok\n"), None);
    }
    let Ok(place) = Arc::clone(&hub.in_flight).try_acquire_owned() else {
        return (Answer::text(503, "too many requests at once: come again\n"), None);
    };
    let busy = IN_FLIGHT.saturating_sub(hub.in_flight.available_permits());
    hub.set.in_flight.store(busy as u64, Ordering::Relaxed);
    deadline.set(TO_MAKE);
    let set = Arc::clone(&hub.set);
    let answer = match route {
        Route::Health => Answer::text(200, "ok\n"),
        Route::Index(whose) => aside(move || answer::index(&set, &chosen(&set, whose))).await,
        Route::Cmdline(whose) => answer::cmdline(&chosen(&set, whose)),
        Route::Metrics => {
            let sites = hub.rules.sites;
            aside(move || Answer {
                kind: metrics::KIND,
                ..Answer::text(200, metrics::metrics(&set, sites))
            })
            .await
        }
        Route::Profile(wanted) => {
            let seconds = wanted.change.unwrap_or_default();
            let served = chosen(&set, wanted.whose);
            let _asking: Vec<_> = served.iter().map(Served::ask).collect();
            deadline.set(TO_ATTACH + TO_MAKE + seconds);
            attached(&served).await;
            let before = match wanted.change {
                None => None,
                Some(seconds) => {
                    let served = served.clone();
                    let before = tokio::task::spawn_blocking(move || Before::now(&served)).await.ok();
                    tokio::time::sleep(seconds).await;
                    before
                }
            };
            // Processes may have come meanwhile.
            let served = if before.is_some() {
                chosen(&set, wanted.whose)
            } else {
                served
            };
            aside(move || answer::answer(&served, &wanted, before.as_ref())).await
        }
    };
    (answer, Some(place))
}

fn why(wrong: Wrong) -> Answer {
    match wrong {
        Wrong::NotFound => Answer::text(404, "there is nothing of that name; / lists what there is\n"),
        Wrong::NotOurs => Answer::text(
            404,
            "pyheap has heap, allocs and cmdline; the other profiles of Go it has not\n",
        ),
        Wrong::Parameter(text) => Answer::text(400, format!("{text}\n")),
    }
}

fn chosen(set: &Set, whose: Whose) -> Vec<Arc<Served>> {
    match whose {
        Whose::All => set.all(),
        Whose::Process(pid) => set.of(pid).into_iter().collect(),
    }
}

/// Until all have hooks, or cannot have them, or it takes too long.
async fn attached(served: &[Arc<Served>]) {
    let end = Instant::now() + TO_ATTACH;
    while served.iter().any(|one| one.is_wanted()) && Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
}

/// Does work on the one thread that answers are made on.
async fn aside(work: impl FnOnce() -> Answer + Send + 'static) -> Answer {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Answer::text(500, "no answer could be made\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_shown_or_not() {
        let token = Token::new("s3cret");
        assert!(token.is_shown_by("Bearer s3cret") && token.is_shown_by("bearer  s3cret"));
        // pyheap:s3cret
        assert!(token.is_shown_by("Basic cHloZWFwOnMzY3JldA=="));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer s3cre",
            "Bearer s3crets",
            "Bearer S3cret",
            "Basic s3cret",
            "s3cret",
        ] {
            assert!(!token.is_shown_by(wrong), "{wrong}");
        }
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn names_that_a_browser_was_led_astray_by() {
        for good in [
            "localhost",
            "localhost:6060",
            "127.0.0.1:6060",
            "[::1]:6060",
            "10.0.0.7",
            "LOCALHOST:1",
        ] {
            assert!(is_local(Some(good), None), "{good}");
        }
        for evil in [
            "evil.example",
            "evil.example:6060",
            "localhost.evil.example",
            "",
            "127.0.0.1.evil.example",
        ] {
            assert!(!is_local(Some(evil), None), "{evil}");
        }
        assert!(is_local(None, None) && !is_local(Some("localhost"), Some("evil.example")));
    }
}
