//! A lock with fencing tokens, from Rust. Every step checks what redfence promises.
//!
//! REDFENCE_SERVER and REDFENCE_STORAGE name the servers; `redfence dev` starts both.

use std::{env, error::Error, process::ExitCode, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use tokio::{sync::mpsc, sync::watch, time};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, transport::Channel};
use tonic_types::StatusExt;
use uuid::Uuid;

use redfence::storage::v1::{PutRequest, storage_service_client::StorageServiceClient};
use redfence::v1::{
    AcquireOutcome, AcquireRequest, KeepAliveRequest, LeaseState, ReleaseOutcome, ReleaseRequest,
    lock_service_client::LockServiceClient,
};

mod redfence {
    pub mod v1 {
        tonic::include_proto!("redfence.v1");
    }
    pub mod storage {
        pub mod v1 {
            tonic::include_proto!("redfence.storage.v1");
        }
    }
}

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const RESOURCE: &str = "examples/rust";
const TTL: Duration = Duration::from_secs(4);
const WAIT: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the time since boot, on a clock that runs on in suspend. `Instant` stops there on Linux,
/// so a lease would seem valid for too long.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Fails with `what` unless `holds`.
fn check(holds: bool, what: impl Into<String>) -> Outcome<()> {
    if holds { Ok(()) } else { Err(what.into().into()) }
}

/// Gives a call a deadline: without one, a call to a frozen server never ends.
fn within<T>(timeout: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// One grant.
struct Lease {
    /// The secret that proves ownership: never log it.
    id: String,
    token: u64,
    /// When the lease ends by `now`; `keep_alive` moves it.
    valid_until: watch::Sender<Duration>,
}

impl Lease {
    /// Whether the lease surely lasts. Check it before each protected step.
    fn is_valid(&self) -> bool {
        now() < *self.valid_until.borrow()
    }
}

/// Acquires the resource, and waits up to WAIT for it.
async fn acquire(locks: &mut LockServiceClient<Channel>, holder: &str) -> Outcome<Lease> {
    // With a lease id of its own, a client may repeat a call that failed: it gets the same grant. A
    // client that gives up instead sends Release with this id.
    let id = Uuid::new_v4().simple().to_string();
    let request = AcquireRequest {
        resource: RESOURCE.into(),
        ttl: Some(TTL.try_into()?),
        wait_timeout: Some(WAIT.try_into()?),
        lease_id: id.clone(),
        holder: holder.into(),
    };
    // The validity counts from before the send. The answer may have been under way for long.
    let sent_at = now();
    let response = locks.acquire(within(WAIT + CALL_TIMEOUT, request)).await?.into_inner();
    check(
        response.outcome() == AcquireOutcome::Granted,
        format!("Acquire of the {holder} holder ended with {:?}", response.outcome()),
    )?;
    let lease = response.lease.ok_or("a granted Acquire has no lease")?;
    let validity: Duration = lease.validity.ok_or("a lease has no validity")?.try_into()?;
    Ok(Lease {
        id,
        token: lease.fencing_token,
        valid_until: watch::Sender::new(sent_at + validity),
    })
}

/// Renews a lease until it is lost. After a failure it opens a new stream.
async fn keep_alive(
    mut locks: LockServiceClient<Channel>,
    lease_id: String,
    valid_until: watch::Sender<Duration>,
) {
    while now() < *valid_until.borrow() {
        if let Err(error) = renew_over_one_stream(&mut locks, &lease_id, &valid_until).await {
            eprintln!("KeepAlive: {error}");
            time::sleep(TTL / 20).await;
        }
    }
    eprintln!("KeepAlive: the lease is over");
}

/// Renews a lease every third of its ttl. It returns when the lease is lost, and fails if the stream does.
async fn renew_over_one_stream(
    locks: &mut LockServiceClient<Channel>,
    lease_id: &str,
    valid_until: &watch::Sender<Duration>,
) -> Outcome<()> {
    let (requests, outgoing) = mpsc::channel(1);
    // tonic waits here for the server's initial metadata; the server sends it before any request.
    let mut responses = time::timeout(TTL / 2, locks.keep_alive(ReceiverStream::new(outgoing)))
        .await
        .map_err(|_| "the server did not open the stream in time")??
        .into_inner();
    let mut ticks = time::interval(TTL / 3);
    for sequence in 1.. {
        ticks.tick().await;
        let sent_at = now();
        let request =
            KeepAliveRequest { resource: RESOURCE.into(), lease_id: lease_id.into(), sequence };
        requests.send(request).await?;
        let response = time::timeout(TTL / 2, responses.message())
            .await
            .map_err(|_| "the server did not answer a renewal in time")??
            .ok_or("the server ended the stream")?;
        match response.state() {
            LeaseState::Active => {
                let validity: Duration = response.validity.unwrap_or_default().try_into()?;
                valid_until.send_replace(sent_at + validity);
            }
            // The lease lasts until its known validity ends. The next renewal may succeed.
            LeaseState::AtRisk => {}
            LeaseState::Lost => {
                valid_until.send_replace(Duration::ZERO);
                return Ok(());
            }
            // The server drains, or refuses the request. With several servers, go to another one.
            LeaseState::Unspecified => return Err(format!("not renewed: {response:?}").into()),
        }
    }
    Ok(())
}

/// Writes under a token. The storage refuses a token lower than one that it has seen.
async fn put(
    storage: &mut StorageServiceClient<Channel>,
    token: u64,
    value: &str,
) -> Result<(), tonic::Status> {
    let request = PutRequest {
        resource: RESOURCE.into(),
        fencing_token: token,
        key: "state".into(),
        value: value.into(),
    };
    storage.put(within(CALL_TIMEOUT, request)).await.map(drop)
}

/// Ends a lease; returns what the server says of it.
async fn release(locks: &mut LockServiceClient<Channel>, lease: &Lease) -> Outcome<ReleaseOutcome> {
    let request = ReleaseRequest { resource: RESOURCE.into(), lease_id: lease.id.clone() };
    Ok(locks.release(within(CALL_TIMEOUT, request)).await?.into_inner().outcome())
}

async fn run() -> Outcome<()> {
    let server = env::var("REDFENCE_SERVER").unwrap_or("127.0.0.1:50051".into());
    let store = env::var("REDFENCE_STORAGE").unwrap_or("127.0.0.1:50052".into());
    let mut locks = LockServiceClient::connect(format!("http://{server}")).await?;
    let mut storage = StorageServiceClient::connect(format!("http://{store}")).await?;

    let first = acquire(&mut locks, "first").await?;
    println!("first holder: acquired {RESOURCE} with token {}", first.token);
    let keeper =
        tokio::spawn(keep_alive(locks.clone(), first.id.clone(), first.valid_until.clone()));

    time::sleep(TTL * 5 / 4).await;
    check(first.is_valid(), "the lease ended although KeepAlive renewed it")?;
    put(&mut storage, first.token, "first").await?;
    println!("first holder: wrote, after more than one ttl");

    // The first holder stops, as in a long garbage collection: nothing renews its lease any more.
    keeper.abort();
    let second = acquire(&mut locks, "second").await?;
    println!("second holder: waited, and acquired it with token {}", second.token);
    check(second.token > first.token, "a later grant has no greater token")?;
    check(!first.is_valid(), "two leases of one resource are valid")?;
    put(&mut storage, second.token, "second").await?;

    // The first holder wakes up, and writes before it looks at its lease.
    let Err(refusal) = put(&mut storage, first.token, "stale").await else {
        return Err("the storage accepted a write with a stale token".into());
    };
    // The status has the details: decide by the reason, never by the message.
    let info = refusal.get_details_error_info().ok_or("the refusal has no ErrorInfo")?;
    check(
        refusal.code() == Code::FailedPrecondition
            && info.domain == "redfence"
            && info.reason == "STALE_TOKEN",
        format!("the stale write was refused with {refusal:?}"),
    )?;
    let highest = info.metadata.get("highest_token").ok_or("the refusal has no highest_token")?;
    println!("first holder: its late write is refused: {}, highest token {highest}", info.reason);

    check(
        release(&mut locks, &second).await? == ReleaseOutcome::Released,
        "Release did not end a lease that was held",
    )?;
    check(
        release(&mut locks, &first).await? == ReleaseOutcome::NotHeld,
        "Release ended a lease that was over",
    )?;
    println!("second holder: released it");
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the Rust example failed: {error}");
            ExitCode::FAILURE
        }
    }
}
