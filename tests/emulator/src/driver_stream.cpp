// The fake driver: streams and events.
#include "driver.h"

namespace emulator::fake {

StreamHandle* find_stream(void* handle) {
  constexpr uintptr_t LEGACY = 1, PER_THREAD = 2;
  uintptr_t value = reinterpret_cast<uintptr_t>(handle);
  if (value == 0 || value == LEGACY || value == PER_THREAD) {
    if (!current_context) return nullptr;
    StreamHandle*& s = driver().default_streams[current_context->device];
    if (!s) s = new StreamHandle{&create_stream(current_context->device)};
    return s;
  }
  auto found = driver().streams.find(static_cast<StreamHandle*>(handle));
  return found == driver().streams.end() ? nullptr : *found;
}

static Result wait(Lock& held, const std::function<bool()>& is_done) {
  if (Result error = failure_code()) return error;
  driver().counts.host_syncs++;
  wait_for(held, is_done);
  return failure_code();
}

Result wait_for_stream(Lock& held, StreamHandle& stream) {
  Stream* s = stream.stream;
  return wait(held, [s] { return s->queue.empty(); });
}

Result wait_for_device(Lock& held, int device) {
  return wait(held, [device] {
    for (auto& s : machine().streams) {
      if (s && s->device == device && !s->queue.empty()) return false;
    }
    return true;
  });
}

void submit(StreamHandle& stream, std::function<void(Stream&)> enqueue_on) {
  if (stream.capture) {
    stream.capture->nodes.push_back({std::move(enqueue_on)});
    stream.follows[&stream] = ++stream.num_captured;
  } else {
    enqueue_on(*stream.stream);
  }
}

void leave_capture(GraphHandle* graph) {
  for (StreamHandle* stream : driver().streams) {
    if (stream->capture == graph) stream->capture = nullptr;
  }
}

void abandon_captures() {
  for (StreamHandle* stream : driver().streams) {
    if (!stream->capture) continue;
    GraphHandle* graph = stream->capture;
    leave_capture(graph);
    delete graph;
  }
  driver().num_capturing = num_captures_of_thread = 0;
}

}  // namespace emulator::fake

using namespace emulator;
using namespace emulator::fake;

namespace {
Result query(const std::function<bool()>& is_done) {
  if (Result error = failure_code()) return error;
  bool done = poll_for(is_done);
  if (Result error = failure_code()) return error;
  return done ? SUCCESS : NOT_READY;
}

// Null if that capture has ended.
GraphHandle* find_capture(uint64_t number) {
  for (StreamHandle* stream : driver().streams) {
    if (stream->capture && stream->capture->capture_number == number) return stream->capture;
  }
  return nullptr;
}
}  // namespace

CUDA_API cuStreamCreate(StreamHandle** stream, unsigned flags) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (!stream || flags > 1) return INVALID_VALUE;
  *stream = new StreamHandle{&create_stream(current_context->device)};
  driver().streams.insert(*stream);
  return SUCCESS;
}
CUDA_API cuStreamCreateWithPriority(StreamHandle** stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
CUDA_API cuStreamDestroy_v2(StreamHandle* stream) {
  DRIVER_CALL_GIVING_BACK(cuStreamDestroy_v2(stream));
  auto held = lock();
  if (!driver().streams.erase(stream)) return INVALID_HANDLE;
  if (GraphHandle* graph = stream->capture) {
    graph->origin->is_capture_broken = true;
    if (stream == graph->origin) {
      leave_capture(graph);
      delete graph;
      driver().num_capturing--;
      if (!stream->is_capture_relaxed) num_captures_of_thread--;
    }
  }
  destroy_stream(*stream->stream);
  delete stream;
  return SUCCESS;
}
CUDA_API cuStreamSynchronize(void* stream) {
  DRIVER_CALL();
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) {
    s->is_capture_broken = true;
    return STREAM_CAPTURE_UNSUPPORTED;
  }
  return wait_for_stream(held, *s);
}
CUDA_API cuStreamQuery(void* stream) {
  DRIVER_CALL();
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) {
    s->is_capture_broken = true;
    return STREAM_CAPTURE_UNSUPPORTED;
  }
  return query([s] { return s->stream->queue.empty(); });
}
CUDA_API cuStreamWaitEvent(void* stream, EventHandle* event, unsigned) {
  DRIVER_CALL();
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s || !event) return INVALID_HANDLE;
  if (event->capture_number) {
    GraphHandle* graph = find_capture(event->capture_number);
    if (!graph) return CAPTURED_EVENT;
    if (!s->capture) {  // the stream joins the capture
      if (!driver().streams.count(s)) return STREAM_CAPTURE_IMPLICIT;
      s->capture = graph;
      s->is_capture_broken = false;
      s->num_captured = 0;
      s->follows.clear();
    }
    if (s->capture != graph) return STREAM_CAPTURE_MERGE;
    for (auto& [stream, work] : event->follows) s->follows[stream] = std::max(s->follows[stream], work);
    return SUCCESS;
  }
  if (s->capture) return STREAM_CAPTURE_ISOLATION;
  if (!event->event->issued) return SUCCESS;
  enqueue(*s->stream, {Operation::WAIT, {}, {}, event->event, event->event->issued});
  return SUCCESS;
}

CUDA_API cuEventCreate(EventHandle** event, unsigned flags) {
  DRIVER_CALL();
  auto held = lock();
  constexpr unsigned DISABLE_TIMING = 2;
  if (!current_context) return INVALID_CONTEXT;
  if (!event) return INVALID_VALUE;
  *event = new EventHandle;
  (*event)->has_timing = !(flags & DISABLE_TIMING);
  driver().num_events++;
  return SUCCESS;
}
CUDA_API cuEventDestroy_v2(EventHandle* event) {
  DRIVER_CALL_GIVING_BACK(cuEventDestroy_v2(event));
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  delete event;
  driver().num_events--;
  return SUCCESS;
}
CUDA_API cuEventRecord(EventHandle* event, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s || !event) return INVALID_HANDLE;
  event->capture_number = s->capture ? s->capture->capture_number : 0;
  event->follows = s->follows;
  if (s->capture) return SUCCESS;
  enqueue(*s->stream, {Operation::RECORD, {}, {}, event->event, ++event->event->issued});
  return SUCCESS;
}
CUDA_API cuEventSynchronize(EventHandle* event) {
  DRIVER_CALL();
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  if (event->capture_number) return CAPTURED_EVENT;
  auto e = event->event;
  uint64_t wanted = e->issued;
  return wait(held, [e, wanted] { return e->done >= wanted; });
}
CUDA_API cuEventQuery(EventHandle* event) {
  DRIVER_CALL();
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  if (event->capture_number) return CAPTURED_EVENT;
  return query([event] { return event->event->done >= event->event->issued; });
}
CUDA_API cuEventElapsedTime_v2(float* milliseconds, EventHandle* begin, EventHandle* end) {
  DRIVER_CALL();
  auto held = lock();
  if (!milliseconds) return INVALID_VALUE;
  for (EventHandle* e : {begin, end}) {
    if (!e || !e->has_timing || !e->event->issued) return INVALID_HANDLE;
    if (e->event->done < e->event->issued) return NOT_READY;
  }
  *milliseconds = float(double(end->event->time_ns) - double(begin->event->time_ns)) * 1e-6f;
  return SUCCESS;
}
CUDA_API cuEventElapsedTime(float* milliseconds, EventHandle* begin, EventHandle* end) {
  return cuEventElapsedTime_v2(milliseconds, begin, end);
}
