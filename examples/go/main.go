// Stream a chat over gRPC.
//
//	cd examples/go
//	go generate && go mod tidy      # makes the stubs; needs buf (pip install buf-bin)
//	go run . "What is the capital of France?"
//
// OCTAVO_ADDRESS gives the address as -address does, OCTAVO_API_KEY the key where the service asks for one.
package main

//go:generate buf generate

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	_ "google.golang.org/genproto/googleapis/rpc/errdetails" // so that details of errors can be decoded
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "octavo.example/client/gen/octavo/v1"
)

func main() {
	known := os.Getenv("OCTAVO_ADDRESS")
	if known == "" {
		known = "127.0.0.1:50051"
	}
	address := flag.String("address", known, "HOST:PORT of the service")
	maxTokens := flag.Uint("max-tokens", 64, "tokens of the answer")
	flag.Parse()
	if err := stream(*address, strings.Join(flag.Args(), " "), uint32(*maxTokens)); err != nil {
		failure := status.Convert(err)
		fmt.Fprintf(os.Stderr, "%s: %s\n", failure.Code(), failure.Message())
		for _, detail := range failure.Details() { // google.rpc: which field, which limit, when to try again
			fmt.Fprintf(os.Stderr, "%v\n", detail)
		}
		os.Exit(1)
	}
}

func stream(address, question string, maxTokens uint32) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()

	// The deadline travels with the call: when it is over, the service stops working on the request.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if key := os.Getenv("OCTAVO_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}

	call, err := pb.NewGenerationServiceClient(connection).GenerateStream(ctx, &pb.GenerateStreamRequest{
		Input: &pb.GenerationInput{
			Prompt: &pb.GenerationInput_Chat{Chat: &pb.ChatPrompt{
				Messages: []*pb.ChatMessage{{Role: "user", Content: question}},
			}},
			// Fields whose zero is not their default are pointers: nil means the model's own value.
			Sampling: &pb.SamplingParams{Temperature: proto.Float32(0.7), Seed: proto.Uint64(7)},
			Stopping: &pb.StoppingParams{MaxTokens: proto.Uint32(maxTokens)},
		},
	})
	if err != nil {
		return err
	}
	for {
		message, err := call.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := message.Event.(type) {
		case *pb.GenerateStreamResponse_Started:
			fmt.Fprintf(os.Stderr, "[%d tokens]\n", event.Started.PromptTokens)
		case *pb.GenerateStreamResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *pb.GenerateStreamResponse_Finished:
			fmt.Fprintf(os.Stderr, "\n[%s: %d tokens]\n", event.Finished.FinishReason, event.Finished.CompletionTokens)
		}
	}
}
