//! One mount, from the first check to the last request, as `mount --foreground` serves it.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{getegid, geteuid};
use serde_json::json;
use tensorfs::Error;
use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::error::{counted, is_url, real_name, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::QueueKey;

use super::attach::{self, Attached, Detach};
use super::client::{Question, RequestRefusal};
use super::connection::{FuseInit, Notifications, open_session};
use super::control::{self, Control, ControlPeer};
use super::ending::Ending;
use super::handover::{Giver, MountIdentity, MountRecord, Received};
use super::place;
use super::read_path::ReadPath;
use super::server::KernelServer;
use super::stalled::{READ_MANY, READ_NONE, probe_path, run_until, unless_stalled};
use super::status::{Listable, Status};
use super::target::{check_links, check_nesting, check_target, warn_of_content};
use crate::fs::adapter::TensorFs;
use crate::fs::adapter::takeover::{Carried, Takeover};
use crate::fs::attributes::{Common, folders_listable_by};
use crate::fs::inodes::{Nodes, OutdatedFact, SetOutcome, TellKernel};
use crate::fs::live::Live;
use crate::fs::sharing::Sharing;
use crate::options::{IndexDir, Options, Passthrough, Verify, Watch};
use crate::serve::assemble::Assembler;
use crate::serve::change_watcher::{Forget, Watcher};
use crate::serve::kernel::{KernelPaths, Knob};
use crate::serve::page_cache_store;
use crate::serve::service::{self, Service};

/// Maximum number of queued messages that tell the kernel about outdated names and attributes.
const OUT_OF_DATE_MAX: usize = 4096;

/// Maximum time for a new mount to answer its first request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments that make a process the probe of a mount. The path of the mount follows them.
const PROBE: [&str; 3] = ["internal", "probe-mount", "--"];

/// The work of the probe: finds out whether the mount on `target` answers. It uses statvfs(3), for which the kernel
/// always asks the daemon. The kernel may answer stat(2) from its cache.
pub(crate) fn answers(target: &Path) -> bool {
    nix::sys::statvfs::statvfs(target).is_ok()
}

/// The work of a probe that reads the first byte of a file near the root, if there is a file. A read that fails
/// counts as an answer.
pub(crate) fn answers_read(target: &Path) -> bool {
    let mut folders = vec![target.to_owned()];
    for _ in 0..PROBED_MAX {
        let Some(folder) = folders.pop() else { break };
        let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        for entry in entries.take(PROBED_MAX) {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let opened = std::fs::File::open(entry.path());
                    let _ = opened.and_then(|mut file| file.read(&mut [0]));
                    return answers(target);
                }
                _ => {}
            }
        }
    }
    answers(target)
}

/// Maximum number of folders that a probe lists, and maximum number of entries of each.
const PROBED_MAX: usize = 64;

/// Minimum and maximum number of threads that read requests. These threads never block, so more threads than cores
/// would not help.
const THREADS: std::ops::RangeInclusive<usize> = 2..=8;

/// A source and a target folder that are checked and ready to be mounted.
pub(crate) struct MountPlan {
    /// Absolute path of the source.
    pub source: PathBuf,
    /// The mount point, as an absolute path.
    pub target: PathBuf,
    /// The mount as the user ordered it, and the path that it reads.
    identity: (MountIdentity, ReadPath),
    nodes: Arc<Nodes>,
    assembler: Option<Assembler>,
    options: Options,
}

impl MountPlan {
    /// Opens the folder of `assemble=`, if the option is set.
    ///
    /// `fresh` says that the mount does not exist yet.
    ///
    /// # Errors
    /// One line with the reason why the folder cannot be used. It is also an error if the folder does not answer.
    pub(crate) fn open_assembler(&mut self, fresh: bool) -> Result<(), String> {
        let options = self.options.clone();
        // A mount that is being taken over is not served now, so accessing it would wait for this process.
        let target = fresh.then(|| self.target.clone());
        let places: Vec<_> = [self.nodes.tree().source.clone()].into_iter().chain(target).collect();
        let folder = options.assemble.as_deref().map(shown_path);
        let open = move || {
            let places: Vec<&Path> = places.iter().map(PathBuf::as_path).collect();
            service::assembler(&options, &places)
        };
        let opened = unless_stalled(self.options.io_timeout, open);
        let stalls = |why| format!("assemble={}: {why}; not mounted", folder.unwrap_or_default());
        self.assembler = opened.map_err(stalls)??;
        Ok(())
    }

    /// Warnings for the user, one on each line. They are in the log already.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.nodes.warnings()
    }
}

/// A mount that answers.
pub(crate) struct Running {
    target: PathBuf,
    pub minor: Option<u32>,
    service: Arc<Service>,
    control: Option<Control>,
    giver: Giver,
}

/// Checks source and target, and proves checkpoints until one of them is valid.
///
/// # Errors
/// One line with the reason. It is also an error if the source or the target does not answer.
pub(crate) fn plan(source: &Path, target: &Path, options: Options) -> Result<MountPlan, String> {
    let place = target.to_owned();
    let stalls = |why: String| format!("{}: {why}; not mounted", shown_path(target));
    let checked = unless_stalled(options.io_timeout, move || check_target(&place));
    let place = checked.map_err(stalls)??;
    plan_on(source, target, place, options, None)
}

/// Plans a takeover of a mount that no process serves now. Does not access the mount. The mount reads the same path
/// as before.
///
/// # Errors
/// The errors of `plan`.
pub(crate) fn plan_takeover(
    source: &Path,
    target: &Path,
    received: &Received,
    options: Options,
) -> Result<MountPlan, String> {
    let MountRecord { target: place, read, .. } = received.mount.clone();
    plan_on(source, target, place.into(), options, Some(read))
}

/// Probes and plans. `target` is the mount point as it was given, and `place` is its absolute path. `before` is the
/// path that the mount has read so far, if the mount exists already.
fn plan_on(
    source: &Path,
    target: &Path,
    place: PathBuf,
    mut options: Options,
    before: Option<ReadPath>,
) -> Result<MountPlan, String> {
    options.remote.take_effect()?;
    let identity = MountIdentity::of(source, target, &options);
    let (limit, wanted) = (options.io_timeout, source.to_owned());
    let stalls = |path: &Path, why: String| format!("{}: {why}; not mounted", shown_path(path));
    let found = ReadPath::meant(before.as_ref(), source, limit);
    let source = found.map_err(|why| stalls(source, why))?.map_err(|e| e.to_string())?;
    let reads = if before.is_none() { READ_MANY } else { READ_NONE };
    probe_path(&source, reads, limit).map_err(|why| stalls(&source, why))?;
    options.disk_cache.is_default = true;
    probe_options(&source, &mut options, reads)?;
    let asked = source.clone();
    let plan = move || plan_source(&wanted, &source, identity, place, options, before);
    let planned = unless_stalled(limit, plan);
    planned.map_err(|why| stalls(&asked, why))?
}

/// Probes the folders and files that `options` name. If an index folder or a disk cache does not answer, it is not
/// used. If any other folder or file does not answer, that is an error. In each folder, the first byte of up to `reads`
/// files is read too.
fn probe_options(source: &Path, options: &mut Options, reads: usize) -> Result<(), String> {
    let limit = options.io_timeout;
    let follow = options.open.follow.iter().map(|folder| ("follow", folder));
    let reference = options.open.reference.iter().map(|file| ("reference", file));
    let assemble = options.assemble.iter().map(|folder| ("assemble", folder));
    let config = options.open.config.iter().map(|path| ("config", path));
    for (option, path) in follow.chain(reference).chain(config).chain(assemble) {
        let stalls = |why| format!("{option}={}: {why}; not mounted", shown_path(path));
        probe_path(path, reads, limit).map_err(stalls)?;
    }
    if let Some(folder) = options.index_dir.folder()
        && let Err(why) = probe_path(&folder, READ_MANY, limit)
    {
        let why = format!("{}: {why}", shown_path(&folder));
        if options.verify == Verify::Read {
            return Err(format!("{why}; verify=read needs its checksums; not mounted"));
        }
        tracing::warn!("{why}; no index is kept");
        options.index_dir = IndexDir::Nowhere;
    }
    if let Some(place) = options.disk_cache.place().filter(|_| is_url(source))
        && let Err(why) = probe_path(&place.folder, READ_NONE, limit)
    {
        tracing::warn!("{}: {why}; there is no disk cache", shown_path(&place.folder));
        options.disk_cache.turn_off();
    }
    Ok(())
}

/// Prevents core dumps of this process, whose memory has a key and decrypted bytes. A limit of 1 byte also prevents
/// dumps to a program through a pipe, which a limit of 0 does not.
fn refuse_core_dumps() {
    let hard = getrlimit(Resource::RLIMIT_CORE).map_or(1, |(_, hard)| hard.min(1));
    if let Err(e) = setrlimit(Resource::RLIMIT_CORE, hard, hard) {
        tracing::warn!("a core dump of this process may hold keys and plain bytes: {e}");
    }
}

/// `given` is the source as the user gave it, and `source` is the path that it means.
fn plan_source(
    given: &Path,
    source: &Path,
    identity: MountIdentity,
    target: PathBuf,
    mut options: Options,
    before: Option<ReadPath>,
) -> Result<MountPlan, String> {
    let fresh = before.is_none();
    let (read, (path, open)) = match before {
        None => ReadPath::find(given, source, &options),
        Some(read) => (read.clone(), read.open(given, &options)?),
    };
    options.open = open;
    if options.open.hub && options.watch() != Watch::Off {
        let why =
            "lies on a mount with layout=hub, which shows the models of its start: give watch=off";
        return Err(format!("{}: {why}", shown_path(source)));
    }
    let (source, identity) = (path, (identity, read));
    let index = place::index_folder(&options, &target);
    let mut open = OpenOptions { index, ..options.open_with_secret()? };
    place::check_disk_cache(&mut open, &target);
    if open.secret.is_some() {
        refuse_core_dumps();
    }
    place::check_config(&open, &target)?;
    let checked = options.verify == Verify::Read;
    if checked && open.index.is_none() {
        let message =
            "verify=read: there is no folder of checksums: give index-dir=DIR, or set HOME";
        return Err(message.to_owned());
    }
    if fresh {
        check_nesting(&source, &target)?;
    }
    let tree = Tree::scan(&source, &open).map_err(|e| e.to_string())?;
    if fresh {
        check_links(&tree, &target)?;
    }
    for line in &tree.left_out.lines {
        tracing::warn!("{line}");
    }
    if let Some(summary) = tree.left_out.summary() {
        tracing::warn!("{summary}");
    }
    let live = options.watch() != Watch::Off;
    let sharing = Sharing::new(&options, geteuid().as_raw(), getegid().as_raw());
    let nodes = Arc::new(Nodes::new(tree, checked, live.then_some(options.watch_grace), sharing));
    // A mount that exists already stays, even if all its checkpoints are refused now.
    if fresh {
        match prove_enough(&nodes) {
            // A watched source may get a whole checkpoint later.
            Err(why) if live => tracing::warn!("{why}; the source is watched"),
            outcome => outcome?,
        }
    }
    Ok(MountPlan { source, target, identity, nodes, assembler: None, options })
}

/// Proves checkpoints until one is valid. Fails if all are refused.
fn prove_enough(nodes: &Nodes) -> Result<(), String> {
    let tree = nodes.tree();
    let families = tree.families().into_iter().map(|top| {
        let place = shown_path(&tree.folder(top).path);
        (place, move || nodes.prove(top))
    });
    prove_until_one(families, &|| tree.nothing_found())
}

/// Proves families until a checkpoint is valid. `families` has the path of each family's folder. A
/// panic during a proof refuses only that family, and a later read of the family's folder tries the
/// proof again.
fn prove_until_one(
    families: impl Iterator<Item = (String, impl FnOnce() -> Vec<SetOutcome>)>,
    nothing_found: &dyn Fn() -> String,
) -> Result<(), String> {
    let mut refusals = Vec::new();
    for (place, prove) in families {
        let outcomes = catch_unwind(AssertUnwindSafe(prove)).unwrap_or_else(|_| {
            let why = format!("{place}: an error in tensorfs: see the log for the panic");
            let outcome = Err(Error::internal(why));
            vec![SetOutcome { name: place, outcome, on_its_way: false }]
        });
        let found = outcomes.iter().any(|one| one.outcome.is_ok());
        let refused = outcomes
            .into_iter()
            .filter_map(|one| Some((one.name, one.outcome.err()?, one.on_its_way)));
        refusals.extend(refused);
        if found {
            for (name, error, _) in refusals.iter().filter(|(.., on_its_way)| !on_its_way) {
                tracing::error!("{name} is not shown: {error}");
            }
            return Ok(());
        }
    }
    match refusals.as_slice() {
        [] => Err(nothing_found()),
        [(_, error, _)] => Err(error.to_string()),
        [(_, error, _), more @ ..] => {
            let are = if more.len() == 1 { "is" } else { "are" };
            let more = counted(more.len(), "more checkpoint");
            Err(format!("{error}; and {more} {are} refused"))
        }
    }
}

/// Mounts and starts to serve. Returns once the mount answers.
///
/// # Errors
/// One line with the reason. Nothing stays mounted.
pub(crate) fn start(plan: MountPlan) -> Result<Running, String> {
    let (target, options) = (plan.target.clone(), plan.options.clone());
    let service =
        Service::start(&options, plan.assembler, plan.nodes.tree().options.secret.clone())?;
    let request = KernelPaths::real().before_mount();
    let source = plan.nodes.tree().source.clone();
    let fsname = options.fsname.clone().unwrap_or_else(|| real_name(&source));
    warn_of_content(&target);
    let Attached { fd, by_fusermount } = attach::attach(&target, &fsname, &options)?;
    let ours = mountinfo::at(&target).unwrap_or_default();
    if ours.iter().filter(|mount| mount.fstype == mountinfo::FSTYPE).count() > 1 {
        let _ = attach::detach(&target, Detach::Lazy);
        return Err(format!(
            "{}: another tensorfs mount was made there at the same time",
            shown_path(&target)
        ));
    }
    let undo = |e: io::Error| {
        let _ = attach::detach(&target, Detach::Lazy);
        format!("{}: {e}", shown_path(&target))
    };
    let fresh = Connected { by_fusermount, connection: Arc::new(fd), received: None };
    let (server, live) = serve(&plan.nodes, &options, fresh, &service).map_err(undo)?;
    let minor = mountinfo::ours_at(&target).ok().flatten().map(|mount| mount.minor);
    let (mount, read) = plan.identity;
    let mount = MountRecord { mount, read, target: target.clone().into(), by_fusermount, minor };
    let giver = Giver { server, mount };
    let mut running = Running { target, minor, service, control: None, giver };
    if let Err(e) = running.wait_for_answer() {
        running.take_off();
        return Err(format!("{}: the mount does not answer: {e}", shown_path(&running.target)));
    }
    running.finish(plan.nodes, &options, live, request);
    Ok(running)
}

/// Serves a mount that another process has stopped serving. Returns once the mount answers. The result of the
/// takeover is in the log.
///
/// # Errors
/// One line with the reason. In this case, this process has read nothing from the connection, so another process
/// may still serve it.
pub(crate) fn take_over(plan: MountPlan, received: Received) -> Result<Running, String> {
    let (target, options) = (plan.target.clone(), plan.options.clone());
    let service =
        Service::start(&options, plan.assembler, plan.nodes.tree().options.secret.clone())?;
    let request = KernelPaths::real().before_mount();
    let fail = |e: io::Error| format!("{}: cannot be taken over: {e}", shown_path(&target));
    let mount = received.mount.clone();
    let (by_fusermount, minor) = (mount.by_fusermount, mount.minor);
    let (connection, handshake, carried) = received.unpack().map_err(fail)?;
    let received = Some((handshake, carried));
    let connected = Connected { by_fusermount, connection: Arc::new(connection), received };
    let (server, live) = serve(&plan.nodes, &options, connected, &service).map_err(fail)?;
    let giver = Giver { server, mount };
    let mut running = Running { target, minor, service, control: None, giver };
    running.finish(plan.nodes, &options, live, request);
    Ok(running)
}

/// A connection, and how it was made.
struct Connected {
    by_fusermount: bool,
    connection: Arc<OwnedFd>,
    /// For a takeover: the handshake and the state of the process that served the connection before.
    received: Option<(FuseInit, Carried)>,
}

/// Starts the threads that answer the kernel.
fn serve(
    nodes: &Arc<Nodes>,
    options: &Options,
    connected: Connected,
    service: &Arc<Service>,
) -> io::Result<(KernelServer, Option<Arc<Live>>)> {
    let Connected { by_fusermount, connection, received } = connected;
    let watcher = Watcher::new();
    let common = Arc::new(Common {
        sharing: nodes.sharing().clone(),
        passthrough: options.passthrough == Passthrough::Auto,
        has_deadline: options.io_timeout.is_some(),
        is_root: !by_fusermount,
        source: nodes.tree().folder(0).path.clone(),
    });
    let (store_queue, store_worker) = page_cache_store::store_queue();
    let (service, watched) = (service.clone(), watcher.clone());
    let fs = TensorFs::new(
        nodes.clone(),
        common.clone(),
        watched,
        service.clone(),
        store_queue,
        connection.clone(),
    );
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = cores.clamp(*THREADS.start(), *THREADS.end());
    let done = received.as_ref().map(|(handshake, _)| handshake);
    let attended = open_session(fs.clone(), &connection, threads, done)?;
    let notifications = Notifications::on(&connection);
    let kernel = notifications.clone();
    let forget: Forget = Arc::new(move |ino| {
        if let Err(e) = kernel.invalidate(ino) {
            tracing::warn!("the kernel keeps old pages of a changed file: {e}");
        }
    });
    let kernel = notifications.clone();
    let store = move |ino, offset, bytes: &[u8]| kernel.store(ino, offset, bytes);
    let (cache, counters) = (service.cache.clone(), service.counters.clone());
    store_worker.start(cache, counters, Box::new(store), forget.clone(), watcher.clone())?;
    let mut takeover = None;
    if let Some((handshake, carried)) = received {
        takeover = Some(fs.take_up(carried, forget.clone()));
        // If a later step fails, the other process continues to use the registrations for passthrough. A drop would
        // close them.
        std::mem::forget(fs.clone());
        // This makes the kernel send again the requests that the other process has read but not
        // answered. It runs before any thread of this process reads requests, so that no request is
        // answered twice.
        if handshake.can_resend() {
            notifications.resend()?;
        }
    }
    let in_flight = service.blocking.in_flight().clone();
    let server = KernelServer::start(fs, connection, threads, in_flight, attended)?;
    watcher.start(forget)?;
    takeover.into_iter().for_each(Takeover::begin);
    let live = kernel_teller(notifications)
        .and_then(|tell_kernel| Live::start(nodes.clone(), options, tell_kernel))
        .unwrap_or_else(|e| {
            tracing::error!("changes of the source are not followed: {e}");
            None
        });
    Ok((server, live))
}

/// Starts the thread that tells the kernel which names and attributes are out of date. It is a
/// thread of its own, because the kernel may make it wait for requests that other threads answer.
/// If the queue of this thread is full, the message is dropped, and the outdated fact stays in the
/// kernel's cache for at most one second.
fn kernel_teller(kernel: Notifications) -> io::Result<TellKernel> {
    let (send, receive) = std::sync::mpsc::sync_channel(OUT_OF_DATE_MAX);
    let tell = move || {
        while let Ok(out_of_date) = receive.recv() {
            let told = match out_of_date {
                OutdatedFact::Name(folder, name) => kernel.invalidate_name(folder, &name),
                OutdatedFact::Attributes(ino) => kernel.invalidate_attributes(ino),
            };
            if let Err(e) = told {
                tracing::debug!("the kernel was not told of a changed name: {e}");
            }
        }
    };
    std::thread::Builder::new().name("tell".to_owned()).spawn(tell)?;
    Ok(Box::new(move |out_of_date| drop(send.try_send(out_of_date))))
}

/// The control socket. If it cannot be made, the mount works without it.
fn control(
    running: &Running,
    minor: u32,
    nodes: Arc<Nodes>,
    is_public: bool,
    live: Option<Arc<Live>>,
) -> Option<Control> {
    let (target, source) = (running.target.clone(), nodes.tree().source.clone());
    let facts = control::MountFacts { target, source, minor, is_public };
    let service = running.service.clone();
    let reply = move |question, peer: &ControlPeer| match question {
        // Users who are not trusted get only the names of the models that they may list.
        Question::Status if !peer.is_trusted() => {
            let models = folders_listable_by(&nodes, peer.uid, &peer.gids);
            let name = |path: &PathBuf| match path.as_os_str().is_empty() {
                true => ".".to_owned(),
                false => real_name(path),
            };
            json!(Listable { models: models.iter().map(name).collect() })
        }
        Question::Status => json!(Status {
            service: service.status(),
            index: nodes.index_status(),
            tail: nodes.tails().status(),
            checkpoints: nodes.sets_status(),
            idle_rules: nodes.sharing().idle_rules(&nodes.tree()),
            watch: live.as_ref().map(|live| live.status()),
        }),
        Question::Heat if !peer.is_trusted() => {
            json!(RequestRefusal {
                error: "only the owner of the mount and root may ask".to_owned()
            })
        }
        Question::Heat => json!(service.heat.report()),
    };
    control::serve(facts, reply)
        .map_err(|e| tracing::warn!("no control socket, so `tensorfs status` sees less: {e}"))
        .ok()
}

impl Running {
    /// Reports the settings that the kernel granted, and opens the control socket.
    fn finish(
        &mut self,
        nodes: Arc<Nodes>,
        options: &Options,
        live: Option<Arc<Live>>,
        request: Knob,
    ) {
        if let Some(init) = self.service.init.get() {
            let report = KernelPaths::real().after_init(self.minor, options, init, request);
            report.log();
            self.service.report(report);
        }
        nodes.index_rest();
        if let Some(minor) = self.minor {
            // The device of a file system without a disk has the major number 0.
            let own = nix::sys::stat::makedev(0, u64::from(minor));
            nodes.tree().leave_out(QueueKey::Device(own));
        }
        self.control =
            self.minor.and_then(|minor| control(self, minor, nodes, options.allow_other, live));
    }

    /// The value that hands the mount over to another process.
    pub(crate) fn giver(&self) -> Giver {
        self.giver.clone()
    }

    /// Waits until a probe process has checked the root of the mount. This process does not check its own mount: if
    /// the mount did not answer, this process could not be killed, because its exit would wait for the answer.
    fn wait_for_answer(&self) -> io::Result<()> {
        let mut probe = Command::new("/proc/self/exe");
        probe.arg0("tensorfs").args(PROBE).arg(&self.target);
        match run_until(probe, Instant::now() + ANSWER_TIMEOUT)? {
            Some(ended) if ended.status.success() => Ok(()),
            Some(ended) => Err(io::Error::other(format!("the probe ended with {}", ended.status))),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Unmounts at once. Reads of open files fail.
    pub(crate) fn take_off(&self) {
        if attach::detach(&self.target, Detach::Force).is_err()
            && let Some(minor) = self.minor
        {
            let _ = place::take_off(minor);
        }
    }

    /// Serves until the unmount. Either another process unmounts, or this process unmounts when it
    /// gets one of `ending::ending_signals`.
    ///
    /// `ending::block_signals` must have blocked the signals in all threads.
    ///
    /// # Errors
    /// The reason why the connection ended, unless it was an unmount.
    pub(crate) fn serve(self) -> Result<(), String> {
        let Running { target, minor, service, control: _until_the_end, giver } = self;
        let taking_off = Arc::new(Mutex::new(()));
        let ending = Ending {
            target: target.clone(),
            minor,
            connection: giver.server.connection().clone(),
            service: service.clone(),
            taking_off: taking_off.clone(),
        };
        std::thread::spawn(move || ending.unmount_on_signal());
        let ended = giver.server.wait();
        let _taken_off = taking_off.lock();
        service.stop();
        match ended {
            None => {
                tracing::info!("{}: another process serves it now", shown_path(&target));
                Ok(())
            }
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => Err(format!("{}: the connection ended: {e}", shown_path(&target))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_the_proof_of_one_folder_leaves_the_others() {
        let one = |name: &str, outcome: fn() -> tensorfs::Result<()>| {
            let set = name.to_owned();
            let prove =
                move || vec![SetOutcome { name: set, outcome: outcome(), on_its_way: false }];
            (name.to_owned(), prove)
        };
        let nothing = || "nothing".to_owned();
        let all = [one("a", || panic!("on purpose")), one("b", || Ok(()))];
        assert_eq!(prove_until_one(all.into_iter(), &nothing), Ok(()));
        let all = [one("a", || panic!("on purpose")), one("b", || Err(Error::usage("b is bad")))];
        let why = prove_until_one(all.into_iter(), &nothing).unwrap_err();
        assert!(
            why.starts_with("a: an error in tensorfs")
                && why.ends_with("1 more checkpoint is refused")
        );
        let none = std::iter::empty::<(String, fn() -> Vec<SetOutcome>)>();
        assert_eq!(prove_until_one(none, &nothing), Err("nothing".to_owned()));
    }
}
