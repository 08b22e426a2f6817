// Limits the send rate of a process and delays what it sends. laconic_lab.network.paced_sockets preloads it (LD_PRELOAD)
// with LACONIC_PACE="RATE BURST DELAY".
//
// All TCP sockets of a process share one token bucket of RATE bytes per second and BURST bytes. A blocking socket waits
// for tokens. A non-blocking one sends as many bytes as there are tokens, or sleeps briefly and returns EAGAIN if there
// are none: a loop that polls its sockets (gloo) then reads what has arrived before it tries again, and the sleep keeps
// it from spinning, because such a socket is always ready. A loop that waits for readiness to change, such as that of
// gRPC, would wait forever: this is for gloo and plain sockets only.
//
// With a DELAY above 0 seconds, bytes that have their tokens go to a queue, and a thread writes them to their socket
// that much later. Connections are set up without delay. close, shutdown and the end of the process wait for the queue.

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fcntl.h>
#include <map>
#include <pthread.h>
#include <vector>

namespace {

constexpr double longest_nap = 1e-3, shortest_nap = 5e-5, chunk_time = 1e-3;
constexpr int most_pieces = 64;
constexpr double drain_time = 10;  // seconds that close and exit wait for a peer that does not read
constexpr size_t slack = 4 << 20;  // beyond the delay times the rate: a busy machine may wake the thread late

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
double rate = 0, burst_s = 0, delay = 0, free_at = 0;  // the bucket is full if free_at is burst_s in the past
size_t chunk = 0;
uint64_t sent = 0;

__attribute__((constructor)) void begin() {
  const char* text = std::getenv("LACONIC_PACE");
  double bytes = 0;
  if (text == nullptr || std::sscanf(text, "%lf %lf %lf", &rate, &bytes, &delay) < 2 || !(rate > 0) || !(bytes > 0) ||
      !(delay >= 0)) {
    std::fprintf(stderr,
                 "laconic: LACONIC_PACE must be two numbers above 0, bytes per second and burst bytes, and seconds of "
                 "delay, got '%s'\n",
                 text ? text : "");
    std::_Exit(2);
  }
  burst_s = bytes / rate;
  chunk = static_cast<size_t>(std::clamp(rate * chunk_time, 1448.0, bytes));
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void nap(double seconds) {
  const auto ns = static_cast<long>(1e9 * std::clamp(seconds, shortest_nap, longest_nap));
  const timespec t{0, ns};
  nanosleep(&t, nullptr);
}

bool paced(int fd) {
  const int before = errno;
  int domain = 0, type = 0;
  socklen_t size = sizeof(int);
  const bool is_tcp = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
                      (domain == AF_INET || domain == AF_INET6) &&
                      getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
  errno = before;
  return is_tcp;
}

bool waits(int fd, int flags) { return !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK); }

// Returns the seconds until bytes may be sent; takes their tokens if that is now.
double take(size_t bytes) {
  pthread_mutex_lock(&mutex);
  const double t = now(), left = free_at - t;
  if (left <= 0) free_at = std::max(free_at, t - burst_s) + static_cast<double>(bytes) / rate;
  pthread_mutex_unlock(&mutex);
  return left;
}

void settle(size_t taken, ssize_t used) {
  const size_t bytes = used > 0 ? static_cast<size_t>(used) : 0;
  pthread_mutex_lock(&mutex);
  free_at -= static_cast<double>(taken - bytes) / rate;
  sent += bytes;
  pthread_mutex_unlock(&mutex);
}

// Bytes on their way: for each socket what was sent and when it is due, in order.
struct Sent {
  double due;
  std::vector<char> bytes;
  size_t done;
};

struct DelayLine {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed;
  std::map<int, std::deque<Sent>> queues;
  std::map<int, int> broken;  // the error that ended a connection, for the next call that sends
  size_t queued = 0;
  bool running = false;

  DelayLine() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
  }
};

// Never destroyed: threads of other libraries may send until the process ends.
DelayLine& line() {
  static DelayLine* made = new DelayLine;
  return *made;
}

// Writes what is due on a socket; returns the time at which there is more to do, or 0 if its queue is empty.
double write_due(int fd, std::deque<Sent>& queue, DelayLine& all) {
  while (!queue.empty()) {
    Sent& first = queue.front();
    const double t = now();
    if (first.due > t) return first.due;
    const size_t left = first.bytes.size() - first.done;
    const ssize_t wrote = syscall(SYS_sendto, fd, first.bytes.data() + first.done, left, MSG_DONTWAIT | MSG_NOSIGNAL,
                                  nullptr, 0);
    if (wrote < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return t + longest_nap;
    if (wrote < 0) {
      all.broken[fd] = errno;
      for (const Sent& each : queue) all.queued -= each.bytes.size() - each.done;
      queue.clear();
      return 0;
    }
    first.done += static_cast<size_t>(wrote);
    all.queued -= static_cast<size_t>(wrote);
    if (first.done == first.bytes.size()) queue.pop_front();
  }
  return 0;
}

void* deliver(void*) {
  DelayLine& all = line();
  pthread_mutex_lock(&all.mutex);
  for (;;) {
    double next = 0;
    for (auto at = all.queues.begin(); at != all.queues.end();) {
      const double due = write_due(at->first, at->second, all);
      if (due > 0) next = next > 0 ? std::min(next, due) : due;
      at = at->second.empty() ? all.queues.erase(at) : std::next(at);
    }
    pthread_cond_broadcast(&all.changed);
    if (next > 0) {
      const timespec until{static_cast<time_t>(next), static_cast<long>(1e9 * (next - static_cast<double>(
                                                           static_cast<time_t>(next))))};
      pthread_cond_timedwait(&all.changed, &all.mutex, &until);
    } else {
      pthread_cond_wait(&all.changed, &all.mutex);
    }
  }
}

// Queues a message whose tokens are taken; -1 with EAGAIN if the receiver does not keep up, or with an earlier error.
ssize_t send_later(int fd, const msghdr& part, size_t bytes) {
  DelayLine& all = line();
  pthread_mutex_lock(&all.mutex);
  const auto failed = all.broken.find(fd);
  if (failed != all.broken.end() || all.queued > static_cast<size_t>(rate * (delay + burst_s)) + slack) {
    const int error = failed != all.broken.end() ? failed->second : EAGAIN;
    pthread_mutex_unlock(&all.mutex);
    errno = error;
    return -1;
  }
  if (!all.running) {
    pthread_t thread;
    all.running = pthread_create(&thread, nullptr, deliver, nullptr) == 0;
    if (!all.running) std::fprintf(stderr, "laconic: no thread can be started to delay what is sent\n"), std::_Exit(2);
    pthread_detach(thread);
  }
  Sent sent_now{now() + delay, std::vector<char>(bytes), 0};
  char* to = sent_now.bytes.data();
  for (size_t i = 0; i < part.msg_iovlen; ++i) {
    std::memcpy(to, part.msg_iov[i].iov_base, part.msg_iov[i].iov_len);
    to += part.msg_iov[i].iov_len;
  }
  std::deque<Sent>& queue = all.queues[fd];
  queue.push_back(std::move(sent_now));
  all.queued += bytes;
  if (queue.size() == 1) pthread_cond_broadcast(&all.changed);
  pthread_mutex_unlock(&all.mutex);
  return static_cast<ssize_t>(bytes);
}

// Waits until a socket's queue, or with fd < 0 every queue, is written.
void drain(int fd) {
  if (!(delay > 0)) return;
  DelayLine& all = line();
  const double until = now() + delay + drain_time;
  pthread_mutex_lock(&all.mutex);
  while ((fd < 0 ? !all.queues.empty() : all.queues.count(fd) > 0) && now() < until) {
    pthread_mutex_unlock(&all.mutex);
    nap(longest_nap);
    pthread_mutex_lock(&all.mutex);
  }
  if (fd >= 0) {
    if (const auto at = all.queues.find(fd); at != all.queues.end()) {
      for (const Sent& each : at->second) all.queued -= each.bytes.size() - each.done;
      all.queues.erase(at);  // its number may soon be another socket's
    }
    all.broken.erase(fd);
  }
  pthread_mutex_unlock(&all.mutex);
}

__attribute__((destructor)) void end() { drain(-1); }

// The next pieces of a message after `skip` bytes, at most `limit` bytes of them.
size_t head(const msghdr& message, size_t skip, size_t limit, iovec* pieces, size_t& count) {
  size_t bytes = 0;
  count = 0;
  for (size_t i = 0; i < message.msg_iovlen && bytes < limit && count < most_pieces; ++i) {
    const iovec& piece = message.msg_iov[i];
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    const size_t size = std::min(piece.iov_len - skip, limit - bytes);
    pieces[count++] = {static_cast<char*>(piece.iov_base) + skip, size};
    bytes += size;
    skip = 0;
  }
  return bytes;
}

ssize_t send_slowly(int fd, const msghdr& message, int flags) {
  const bool blocking = waits(fd, flags);
  size_t done = 0;
  for (;;) {
    iovec pieces[most_pieces];
    msghdr part = message;
    part.msg_iov = pieces;
    const size_t bytes = head(message, done, chunk, pieces, part.msg_iovlen);
    if (const double left = take(bytes); left > 0) {
      if (done && !blocking) return static_cast<ssize_t>(done);
      nap(left);
      if (blocking) continue;
      errno = EAGAIN;
      return -1;
    }
    if (done) part.msg_control = nullptr, part.msg_controllen = 0;
    const ssize_t result = delay > 0 && bytes ? send_later(fd, part, bytes) : syscall(SYS_sendmsg, fd, &part, flags);
    settle(bytes, result);
    if (delay > 0 && result < 0 && errno == EAGAIN) {
      if (done && !blocking) return static_cast<ssize_t>(done);
      nap(longest_nap);
      if (blocking) continue;
      errno = EAGAIN;
      return -1;
    }
    if (result < 0) return done ? static_cast<ssize_t>(done) : result;
    done += static_cast<size_t>(result);
    if (!bytes || (!blocking && static_cast<size_t>(result) < bytes)) return static_cast<ssize_t>(done);
    iovec rest[most_pieces];
    size_t count = 0;
    if (!head(message, done, 1, rest, count)) return static_cast<ssize_t>(done);
  }
}

ssize_t send_one(int fd, const void* data, size_t size, int flags, const sockaddr* to, socklen_t to_size) {
  iovec piece{const_cast<void*>(data), size};
  msghdr message{};
  message.msg_name = const_cast<sockaddr*>(to);
  message.msg_namelen = to_size;
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  return send_slowly(fd, message, flags);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The number of bytes that were sent through these functions.
EXPORT uint64_t laconic_paced_bytes() {
  pthread_mutex_lock(&mutex);
  const uint64_t total = sent;
  pthread_mutex_unlock(&mutex);
  return total;
}

EXPORT ssize_t write(int fd, const void* data, size_t size) {
  return paced(fd) ? send_one(fd, data, size, 0, nullptr, 0) : syscall(SYS_write, fd, data, size);
}

EXPORT ssize_t writev(int fd, const iovec* pieces, int count) {
  if (count < 0 || !paced(fd)) return syscall(SYS_writev, fd, pieces, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(count);
  return send_slowly(fd, message, 0);
}

EXPORT ssize_t send(int fd, const void* data, size_t size, int flags) {
  return paced(fd) ? send_one(fd, data, size, flags, nullptr, 0)
                   : syscall(SYS_sendto, fd, data, size, flags, nullptr, 0);
}

EXPORT ssize_t sendto(int fd, const void* data, size_t size, int flags, const sockaddr* to, socklen_t to_size) {
  return paced(fd) ? send_one(fd, data, size, flags, to, to_size)
                   : syscall(SYS_sendto, fd, data, size, flags, to, to_size);
}

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  return paced(fd) ? send_slowly(fd, *message, flags) : syscall(SYS_sendmsg, fd, message, flags);
}

EXPORT int close(int fd) {
  drain(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}

EXPORT int shutdown(int fd, int how) {
  if (how != SHUT_RD) drain(fd);
  return static_cast<int>(syscall(SYS_shutdown, fd, how));
}
