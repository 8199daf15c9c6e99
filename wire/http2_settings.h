// The HTTP/2 settings of both ends, server and client.
//
// gRPC left to itself changes its window with each estimate of the connection's bandwidth and with the pressure on its
// memory. With version 1.51 an upload of large chunks was once ended in its middle by the server's RST_STREAM with
// PROTOCOL_ERROR, which gRPC sends where a frame is beyond the window, and which clients see as INTERNAL. So the window
// stands still; for a message that is awaited gRPC opens it further.
#ifndef LAYERD_WIRE_HTTP2_SETTINGS_H_
#define LAYERD_WIRE_HTTP2_SETTINGS_H_

namespace layerd {

inline constexpr int kHttp2WindowBytes = 4 << 20;  // of a stream, before its message is awaited
inline constexpr int kHttp2FrameBytes = 1 << 20;   // at most; left to itself gRPC raises it too, from 16 KiB

}  // namespace layerd

#endif  // LAYERD_WIRE_HTTP2_SETTINGS_H_
