// An agent of seamflow from protos/ alone: two turns in each rollout that it leases, until the run ends.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	common "seamflow/common/v1"
	pb "seamflow/rollout/v1"
	trajectory "seamflow/trajectory/v1"
)

// Debian's grpc 1.33 panics on what its newer protoc-gen-go makes; newer releases need no codec.
type codec struct{}

func (codec) Name() string                       { return "proto" }
func (codec) Marshal(m any) ([]byte, error)      { return proto.Marshal(m.(proto.Message)) }
func (codec) Unmarshal(data []byte, m any) error { return proto.Unmarshal(data, m.(proto.Message)) }

var gateway pb.RolloutServiceClient
var run, resumed = os.Args[2], 0

func bearer(token string) context.Context {
	return metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+token)
}

func decode(err error) (*common.ErrorInfo, *common.BadRequest, *common.RetryInfo) { // details of a failed call
	info, request, retry := &common.ErrorInfo{}, &common.BadRequest{}, &common.RetryInfo{}
	kinds := map[string]proto.Message{"type.googleapis.com/google.rpc.ErrorInfo": info,
		"type.googleapis.com/google.rpc.BadRequest": request, "type.googleapis.com/google.rpc.RetryInfo": retry}
	for _, detail := range status.Convert(err).Proto().GetDetails() {
		if kind := kinds[detail.TypeUrl]; kind != nil {
			_ = proto.Unmarshal(detail.Value, kind)
		}
	}
	return info, request, retry
}

// Repeats a call, ever more slowly, as long as it may succeed. Other failures end the agent; its rollout is replaced.
func call[Q, A any](ctx context.Context, rpc func(context.Context, Q, ...grpc.CallOption) (A, error), request Q) A {
	for delay := 100 * time.Millisecond; ; delay = (delay + 2*time.Second) / 2 {
		limited, cancel := context.WithTimeout(ctx, 10*time.Minute)
		answer, err := rpc(limited, request)
		cancel()
		info, _, retry := decode(err)
		if code := status.Code(err); code == codes.OK {
			return answer
		} else if code != codes.Unavailable && code != codes.Aborted && retry.RetryDelay == nil {
			panic(info.Reason + ": " + err.Error())
		}
		time.Sleep(retry.RetryDelay.AsDuration() + delay)
	}
}

// Streams a turn from the first missing token on. The first stream of all is broken on purpose.
func generate(ctx context.Context, request *pb.GenerateRequest, _ ...grpc.CallOption) (*pb.TurnEnd, error) {
	stream, err := gateway.Generate(ctx, request)
	for err == nil {
		var event *pb.GenerateResponse
		if event, err = stream.Recv(); event.GetEnd() != nil {
			return event.GetEnd(), nil
		}
		request.ResumeFromOffset += int32(len(event.GetChunk().GetTokens().GetTokenIds()))
		if err == io.EOF || resumed == 0 && request.ResumeFromOffset > 0 { // EOF: the gateway drains
			resumed++
			return nil, status.Error(codes.Unavailable, "the stream ended before the turn")
		}
	}
	return nil, err
}

// Makes two turns, the second with the first one's answer, and closes the rollout with a reward.
func play(lease *pb.RolloutLease) {
	ctx, said := bearer(lease.Credential), []*pb.Message{}
	for _, text := range []string{"at 03 up to 20", "at 20 down to 09"} {
		said = append(said, &pb.Message{Role: "user", Content: []*pb.ContentPart{{Type: "text", Text: text}}})
		turn := &pb.GenerateRequest{RunId: run, RolloutId: lease.RolloutId, TurnId: fmt.Sprint("turn-", len(said)),
			Prompt: &pb.GenerateRequest_Messages{Messages: &pb.Messages{Messages: said}}}
		said = append(said, call(ctx, generate, turn).Message)
	}
	call(ctx, gateway.FinishRollout, &pb.FinishRolloutRequest{RunId: run, RolloutId: lease.RolloutId,
		Outcome: &pb.FinishRolloutRequest_Rewards{Rewards: &common.Rewards{Rewards: []*common.Reward{{Name: "reward", Value: 1}}}}})
}

func main() {
	limits := grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{}), grpc.MaxCallRecvMsgSize(64<<20))
	connection, _ := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithBackoffMaxDelay(time.Second), limits)
	gateway = pb.NewRolloutServiceClient(connection)
	agent := bearer(os.Getenv("TOKEN"))
	for ended := false; !ended; {
		answer := call(agent, gateway.LeaseRollouts, &pb.LeaseRolloutsRequest{RunId: run, Purpose: common.Purpose_PURPOSE_EVAL,
			RequestId: fmt.Sprint(time.Now().UnixNano()), Wait: durationpb.New(20 * time.Second)})
		ended = answer.EmptyReason == trajectory.EmptyReason_EMPTY_REASON_RUN_ENDED
		for _, lease := range answer.Leases {
			var extend *time.Timer // runs in the background until the rollout has finished or is lost
			extend = time.AfterFunc(lease.LeaseDuration.AsDuration()/3, func() {
				held := []*pb.RolloutCredential{{RolloutId: lease.RolloutId, Credential: lease.Credential}}
				answer := call(agent, gateway.ExtendRollouts, &pb.ExtendRolloutsRequest{RunId: run, Rollouts: held})
				if len(answer.LostRolloutIds) == 0 {
					extend.Reset(answer.LeaseDuration.AsDuration() / 3)
				}
			})
			play(lease)
			extend.Stop()
		}
	}
	_, err := gateway.LeaseRollouts(agent, &pb.LeaseRolloutsRequest{}) // shows what a refused call tells
	info, wrong, _ := decode(err)
	fmt.Printf(`{"resumed": %d, "refusal": {"reason": %q, "fields": [%q], "text": %q}}`, resumed, info.Reason,
		wrong.FieldViolations[0].Field, status.Convert(err).Message())
}
